"""laconic's outer steps beside its peers' in turns: seconds to the same validation loss, one JSON row for each.

    python peers/compare.py --data FILE --out DIR | python -m results add peers --what ... --command ...

For every seed each contender trains once, in a lab of its own, all one after the other, so that a machine that others
use too is as fast for one as for the next on average. A run whose evaluations DIR already holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LACONIC = [sys.executable, "-m", "laconic"]
ACCELERATE = ["accelerate_local_sgd.py", "--every", "16"]
TORCHFT = ["torchft_diloco.py", "--every", "16"]
CONTENDERS = {
    "laconic local:every=16": "local:every=16",
    "Accelerate LocalSGD, 16 steps": ACCELERATE,
    "laconic streaming:every=16,fragments=4,delay=4,lr=0.7,momentum=0.9": (
        "streaming:every=16,fragments=4,delay=4,lr=0.7,momentum=0.9"
    ),
    "torchft DiLoCo, 16 steps": TORCHFT,
    "torchft DiLoCo, 16 steps, 4 fragments, delay 3": [*TORCHFT, "--fragments", "4", "--delay", "3"],
}
_TIMEOUT_S = 600


def main() -> None:
    """Run all, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the evaluations of all runs")
    parser.add_argument("--target", type=float, required=True, help="the validation loss to reach")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--link", default="20mbit")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--eval-every", type=int, default=16)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in CONTENDERS}
    for seed in range(asked.seeds):
        names = list(CONTENDERS)
        for number, name in enumerate(names[seed:] + names[:seed]):  # who begins changes with the seed
            start = time.monotonic()
            runs[name].append(_evaluations(name, seed, asked))
            seconds = time.monotonic() - start
            print(f"seed {seed}, {number + 1} of {len(names)}: {name}, {seconds:.0f} s", file=sys.stderr, flush=True)
    for name, of in runs.items():
        print(json.dumps(_row(name, of, asked.target)))


def _evaluations(name: str, seed: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Those of one run, each with the bytes that had left host 0 for the sake of training."""
    contender = CONTENDERS[name]
    kept: Path = asked.out / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}.jsonl"
    if not kept.exists():
        job = ["--task", "chars", "--model", "gpt-tiny", "--data", str(asked.data), "--batch", "4", "--context", "64"]
        job += ["--schedule", "constant", "--warmup", "20", "--steps", str(asked.steps)]
        job += ["--eval-every", str(asked.eval_every), "--seed", str(seed)]
        lab = ["--hosts", str(asked.hosts), "--link", asked.link]
        if isinstance(contender, str):
            facts = _train(contender, [*lab, *job], asked.out / "run")
        else:
            script, *options = contender
            facts = _peer([*LACONIC, "lab", "run", *lab, "--", sys.executable, str(HERE / script), *options, *job])
        kept.write_text("".join(json.dumps(fact) + "\n" for fact in facts), encoding="utf-8")
    return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]


def _train(scheme: str, options: list[str], folder: Path) -> list[dict[str, Any]]:
    command = [*LACONIC, "train", *options, "--scheme", scheme, "--out", str(folder), "--no-checkpoint", "--quiet"]
    _run(command)
    sent = 0
    evaluations = []
    for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines():
        fact = json.loads(line)
        sent += fact["link_bytes_out"] if fact["kind"] == "step" else 0
        if fact["kind"] == "eval":
            evaluations.append({**{key: fact[key] for key in ("step", "seconds", "loss")}, "link_bytes_out": sent})
    return evaluations


def _peer(command: list[str]) -> list[dict[str, Any]]:
    lines = (line.removeprefix("[0] ") for line in _run(command).splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def _run(command: list[str]) -> str:
    """What the command printed; what it said while it worked is shown only where it fails."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
    return ran.stdout


def _row(name: str, runs: list[list[dict[str, Any]]], target: float) -> dict[str, Any]:
    """Medians over seeds, and the seeds apart; a time is that of the first evaluation at the target."""
    first = [next((fact for fact in run if fact["loss"] <= target), None) for run in runs]
    seconds = [fact["seconds"] for fact in first if fact is not None]
    last = [run[-1] for run in runs]
    most = [run[-2] for run in runs]  # laconic's last evaluation has an average of all models before it, on the clock
    return {
        "outer step": name,
        f"s to loss {target:g}": statistics.median(seconds) if len(seconds) == len(runs) else None,
        "by seed": ", ".join("-" if fact is None else f"{fact['seconds']:.1f}" for fact in first),
        "steps to it": ", ".join("-" if fact is None else str(fact["step"]) for fact in first),
        "final loss": statistics.median(fact["loss"] for fact in last),
        "ms a step": 1e3 * statistics.median(fact["seconds"] / fact["step"] for fact in most),
        "bytes out a step": round(statistics.median(fact["link_bytes_out"] / fact["step"] for fact in most)),
    }


if __name__ == "__main__":
    main()
