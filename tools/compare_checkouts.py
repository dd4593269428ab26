"""Step times of two checkouts in one run: alternating rounds in the same lab settings, medians, one JSON row a scheme.

    python tools/compare_checkouts.py ../before . --rounds 5 | python -m laconic.measure.results add step-times ...

Each checkout's own Python (.venv/bin/python) runs its own code. What is printed after the rounds are ratios: a machine
that others use too has no times of its own.
"""

from __future__ import annotations

import argparse
import json
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
    parser.add_argument("--hosts", default="4")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--steps", default="40")
    parser.add_argument("--scheme", action="append")
    asked = parser.parse_args()
    schemes = asked.scheme or list(SCHEMES)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(asked.rounds):
        order = ("before", "after") if number % 2 == 0 else ("after", "before")
        for which in order:
            checkout: Path = getattr(asked, which)
            for scheme, step_ms in _round(checkout, schemes, asked.hosts, asked.link, asked.steps).items():
                times.setdefault((which, scheme), []).append(step_ms)
        print(f"round {number + 1} of {asked.rounds} is over", file=sys.stderr, flush=True)
    for scheme in schemes:
        before = statistics.median(times["before", scheme])
        after = statistics.median(times["after", scheme])
        rounds = [b / a for a, b in zip(times["before", scheme], times["after", scheme], strict=True)]
        row = {"scheme": scheme, "before_ms": before, "after_ms": after, "after/before": after / before}
        print(json.dumps({**row, "smallest of rounds": min(rounds), "largest": max(rounds)}))


def _round(checkout: Path, schemes: list[str], hosts: str, link: str, steps: str) -> dict[str, float]:
    """The median step of each scheme, in ms."""
    command = [".venv/bin/python", "-m", "laconic", "compare", "--hosts", hosts, "--link", link, "--steps", steps]
    command += ["--eval-every", steps, "--json"]
    for scheme in schemes:
        command += ["--scheme", scheme]
    ran = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    rows = json.loads(ran.stdout.splitlines()[-1])["rows"]
    return {row["scheme"]: row["step_ms"] for row in rows}


if __name__ == "__main__":
    main()
