"""Predicted against measured: cells drawn by a seed, each planned and then trained for some steps in the lab.

python -m laconic.measure.foretold run --seed 0 --places 12 --cells-each 5 --text FILE --images DIR --out LINES
python -m laconic.measure.foretold summarize LINES...
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic.measure.records import RECORDS, WARM_UP_STEPS
from laconic.recipes import parse

RECIPES = (
    *("dense", "bf16", "maxnorm:bits=4", "topk:rho=0.01", "topk:rho=0.001", "overlap:rho=0.01", "lowrank:rank=4"),
    *("lowrank:rank=4,form=alternating", "local:every=8", "diloco:every=8", "streaming:every=8,delay=1", "gossip"),
)
LINKS = ("10mbit", "100mbit", "1gbit", "none")
DELAYS = ("0ms", "20ms")
_STEPS = 20
_PERIOD = 8  # of all recipes that agree now and then; whole ones are measured
_LONGEST_S = 5.0  # of a step; slower cells are left out
_WITHIN = 0.1
_NEVER_OVER = 0.3


@dataclass(frozen=True)
class Site:
    """A model on some hosts and links."""

    model: str
    hosts: int
    link: str
    delay: str

    def words(self, text: Path, images: Path) -> list[str]:
        """The options that make it."""
        where = ["--hosts", str(self.hosts), "--link", self.link, "--delay", self.delay]
        jobs = {
            "cnn": ["--task", "fashion-mnist"],
            "resnet20": ["--task", "cifar10", "--model", "resnet20", "--data", str(images)],
            "gpt-tiny": ["--task", "chars", "--model", "gpt-tiny", "--data", str(text), "--batch", "4"],
            "gpt-small": ["--task", "chars", "--model", "gpt-small", "--data", str(text), "--batch", "2"],
            "gpt2": ["--task", "chars", "--model", "gpt2", "--data", str(text), "--device", "cuda", "--amp", "bf16"],
        }
        return [*jobs[self.model], *where]


def draw(seed: int, num_places: int, cells_each: int, models: Sequence[str]) -> list[tuple[Site, list[str]]]:
    """Places of these models, and recipes at each."""
    chance = random.Random(seed)
    found: list[tuple[Site, list[str]]] = []
    while len(found) < num_places:
        model = models[len(found) % len(models)]
        place = Site(
            model, 4 if model == "gpt2" else chance.choice((2, 4)), chance.choice(LINKS), chance.choice(DELAYS)
        )
        if place not in [other for other, _ in found]:
            found.append((place, chance.sample(RECIPES, cells_each)))
    return found


def _laconic(command: str, words: Sequence[str]) -> dict[str, Any] | None:
    """What a command printed as its last line of JSON; None where it failed."""
    ran = subprocess.run(
        [sys.executable, "-m", "laconic", command, *words, "--json"], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        print(f"{command} {' '.join(words)}: {ran.stderr.strip()[-300:]}", file=sys.stderr, flush=True)
        return None
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def run(place: Site, recipes: Sequence[str], words: Sequence[str]) -> list[dict[str, Any]]:
    """Plan, then train under each recipe; one line a cell."""
    start = time.perf_counter()
    schemes = dict.fromkeys(["bf16", *recipes])
    plan = _laconic("plan", [*words, *(word for recipe in schemes for word in ("--scheme", recipe))])
    if plan is None:
        return []
    planning_s = time.perf_counter() - start
    cells = []
    for row in plan["rows"]:
        if row["scheme"] not in [str(parse(recipe)) for recipe in recipes] or row["step_ms"] > 1e3 * _LONGEST_S:
            continue
        cell = {**asdict(place), "scheme": row["scheme"], "predicted_ms": row["step_ms"], "tried": row["tried"]}
        cell |= {"planned_s": plan["seconds"], "planning_s": planning_s, "pick": plan["pick"], "limit": plan["limit"]}
        with tempfile.TemporaryDirectory() as folder:
            asked = [*words, "--scheme", row["scheme"], "--steps", str(_STEPS), "--no-checkpoint", "--out", folder]
            if _laconic("train", [*asked, "--eval-every", "1000"]) is None:
                continue
            cells.append(cell | _measured(Path(folder), parse(row["scheme"]).of_what))
    return cells


def _measured(folder: Path, of_what: str) -> dict[str, float]:
    """Steps as they were: median and quartiles, or the mean where only some of them talk."""
    facts = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    steps = [fact["ms"] for fact in facts if fact["kind"] == "step"]
    steps = steps[WARM_UP_STEPS if of_what == "gradients" else _STEPS % _PERIOD :]
    low, middle, high = statistics.quantiles(steps, n=4)
    return {
        "measured_ms": middle if of_what == "gradients" else statistics.fmean(steps),
        "low_ms": low,
        "high_ms": high,
    }


def summarize(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many are near, and the worst."""
    off = [cell["predicted_ms"] / cell["measured_ms"] - 1 for cell in cells]
    near = [
        abs(one) <= _WITHIN or cell["low_ms"] <= cell["predicted_ms"] <= cell["high_ms"]
        for one, cell in zip(off, cells, strict=True)
    ]
    worst = max(range(len(cells)), key=lambda index: abs(off[index]))
    return {
        "cells": len(cells),
        "within_a_tenth_or_quartiles": sum(near) / len(cells),
        "over_30_percent_off": sum(abs(one) > _NEVER_OVER for one in off),
        "median_off": statistics.median(map(abs, off)),
        "worst": {**cells[worst], "off": off[worst]},
        "planning_s_longest": max(cell["planned_s"] for cell in cells),
    }


def main() -> None:
    """Run or summarize."""
    parser = argparse.ArgumentParser(prog="python -m laconic.measure.foretold", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    runs = modes.add_parser("run")
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--places", type=int, default=12)
    runs.add_argument("--cells-each", type=int, default=5)
    runs.add_argument("--models", default="cnn,resnet20,gpt-tiny,gpt-small")
    runs.add_argument("--text", type=Path, required=True)
    runs.add_argument("--images", type=Path, required=True)
    runs.add_argument("--out", type=Path, required=True)
    modes.add_parser("summarize").add_argument("lines", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.mode == "summarize":
        cells = [json.loads(line) for path in asked.lines for line in path.read_text().splitlines()]
        print(json.dumps(summarize(cells)))
        return
    with asked.out.open("a") as out:
        for place, recipes in draw(asked.seed, asked.places, asked.cells_each, asked.models.split(",")):
            for cell in run(place, recipes, place.words(asked.text, asked.images)):
                out.write(json.dumps(cell) + "\n")
                out.flush()
                print(
                    f"{cell['model']} {cell['link']} {cell['scheme']}: {cell['predicted_ms']:.1f} foretold, "
                    f"{cell['measured_ms']:.1f} measured",
                    file=sys.stderr,
                    flush=True,
                )


if __name__ == "__main__":
    main()
