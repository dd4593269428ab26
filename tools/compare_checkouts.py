"""Step times of two checkouts in one run: alternating rounds in the same lab settings, medians, one JSON row a scheme.

    python tools/compare_checkouts.py ../before . --link 1gbit | python tools/results.py add step-times ...

Each checkout's own Python runs its own code, or the one that --python names, with the checkout's src before all else;
an editable install of another checkout would come before that.
Without --link the workers are processes, not hosts of a lab. Ratios are what counts: a machine that others use too has
no times of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

SCHEMES = ("dense", "bf16", "topk:rho=0.01", "maxnorm:bits=4", "overlap:rho=0.01", "gossip")


def main() -> None:
    """Run both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default="4")
    parser.add_argument("--link", help="put the workers on hosts of a lab with such links, as 1gbit")
    parser.add_argument("--python", default=".venv/bin/python", help="from a checkout's folder")
    parser.add_argument("--steps", default="40")
    parser.add_argument("--scheme", action="append")
    parser.add_argument("--options", default="", help="more words for `laconic compare`, as '--task chars'")
    args = parser.parse_args()
    schemes = args.scheme or list(SCHEMES)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds):
        order = ("before", "after") if number % 2 == 0 else ("after", "before")
        for which in order:
            checkout: Path = getattr(args, which)
            for scheme, step_ms in _round(checkout, schemes, args).items():
                times.setdefault((which, scheme), []).append(step_ms)
        print(f"round {number + 1} of {args.rounds} is over", file=sys.stderr, flush=True)
    for scheme in schemes:
        before = statistics.median(times["before", scheme])
        after = statistics.median(times["after", scheme])
        rounds = [b / a for a, b in zip(times["before", scheme], times["after", scheme], strict=True)]
        row = {"scheme": scheme, "before_ms": before, "after_ms": after, "after/before": after / before}
        print(json.dumps({**row, "smallest of rounds": min(rounds), "largest": max(rounds)}))


def _round(checkout: Path, schemes: list[str], args: argparse.Namespace) -> dict[str, float]:
    """The median step of each scheme, in ms."""
    where = ["--hosts", args.workers, "--link", args.link] if args.link else ["--workers", args.workers]
    command = [args.python, "-m", "laconic", "compare", *where, "--steps", args.steps, "--eval-every", args.steps]
    command += [*shlex.split(args.options), "--json", *(word for scheme in schemes for word in ("--scheme", scheme))]
    sources = [str((checkout / folder).resolve()) for folder in ("src", "lab/src")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
    ran = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=True)
    rows = json.loads(ran.stdout.splitlines()[-1])["rows"]
    return {row["scheme"]: row["step_ms"] for row in rows}


if __name__ == "__main__":
    main()
