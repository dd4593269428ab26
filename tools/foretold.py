"""Predicted against measured: cells drawn by a seed, or declared, each planned and then trained a little in a lab.

python tools/foretold.py run --seed 0 --sites 12 --cells-each 5 --text FILE --images DIR --out LINES
python tools/foretold.py run --declared --text FILE --out LINES
python tools/foretold.py summarize LINES... [--steps RECORD]

With the steps that recipes take to a target (a record of `penalties`, of other seeds than those that
plans go by), `summarize` also says what the picks of the declared sites lose against the best.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic.recipes import parse
from laconic.scheme import AnyScheme, Scheme
from laconic_lab.records import RECORDS, WARM_UP_STEPS
from penalties import KINDS

RECIPES = (
    *("dense", "bf16", "maxnorm:bits=4", "topk:rho=0.01", "topk:rho=0.001", "overlap:rho=0.01", "lowrank:rank=4"),
    *("lowrank:rank=4,form=alternating", "local:every=8", "diloco:every=8", "streaming:every=8,delay=1", "gossip"),
)
LINKS = ("10mbit", "100mbit", "1gbit", "none")
DELAYS = ("0ms", "20ms")
_STEPS = 20
_FEW = 4  # steps, after which two whole periods are measured where recipes agree now and then
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

    def words(self, text: Path, images: Path | None) -> list[str]:
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


_CNN = ("bf16", "topk:rho=0.01", "maxnorm:bits=4", "lowrank:rank=4", "local:every=16")
_GPT = ("bf16", "maxnorm:bits=4", "lowrank:rank=4", "local:every=16", "streaming:every=32")
DECLARED = (
    *((Site("cnn", 4, link, "0ms"), _CNN) for link in LINKS),
    (Site("cnn", 4, "100mbit", "20ms"), _CNN),
    *((Site("gpt-tiny", 4, link, "0ms"), _GPT) for link in ("10mbit", "100mbit", "1gbit")),
)


def draw(seed: int, num_sites: int, cells_each: int, models: Sequence[str]) -> list[tuple[Site, Sequence[str]]]:
    """Sites of these models, and recipes at each."""
    chance = random.Random(seed)
    found: list[tuple[Site, Sequence[str]]] = []
    while len(found) < num_sites:
        model = models[len(found) % len(models)]
        site = Site(model, 4 if model == "gpt2" else chance.choice((2, 4)), chance.choice(LINKS), chance.choice(DELAYS))
        if site not in [other for other, _ in found]:
            found.append((site, chance.sample(RECIPES, cells_each)))
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


def run(site: Site, recipes: Sequence[str], words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Plan, then train under each recipe: a cell each."""
    start = time.perf_counter()
    schemes = dict.fromkeys(["bf16", *recipes])
    plan = _laconic("plan", [*words, *(word for recipe in schemes for word in ("--scheme", recipe))])
    if plan is None:
        return
    planning_s = time.perf_counter() - start
    wanted = {str(parse(recipe)): recipe for recipe in recipes}
    for row in plan["rows"]:
        if row["scheme"] not in wanted or row["step_ms"] > 1e3 * _LONGEST_S:
            continue
        cell = {**asdict(site), "recipe": wanted[row["scheme"]], "predicted_ms": row["step_ms"], "tried": row["tried"]}
        cell |= {"planned_s": plan["seconds"], "planning_s": planning_s, "pick": plan["pick"], "limit": plan["limit"]}
        scheme = parse(row["scheme"])
        steps = max(_STEPS, _FEW + 2 * scheme.when.every) if scheme.of_what == "drift" else _STEPS
        with tempfile.TemporaryDirectory() as folder:
            args = [*words, "--scheme", row["scheme"], "--steps", str(steps), "--no-checkpoint", "--out", folder]
            if _laconic("train", [*args, "--eval-every", "1000"]) is not None:
                yield cell | _measured(Path(folder), scheme)


def _measured(folder: Path, scheme: AnyScheme) -> dict[str, float]:
    """Steps as they were: median and quartiles, or the mean where not all of them say as much."""
    facts = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    steps = [fact["ms"] for fact in facts if fact["kind"] == "step"]
    of_gradients = scheme.of_what == "gradients"
    steps = steps[WARM_UP_STEPS if of_gradients else _FEW :]
    low, middle, high = statistics.quantiles(steps, n=4)
    are_alike = of_gradients and not (isinstance(scheme, Scheme) and scheme.select.takes_turns)
    return {"measured_ms": middle if are_alike else statistics.fmean(steps), "low_ms": low, "high_ms": high}


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


def picks(cells: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each declared site: what its pick takes to the target beside the best of its recipes, by measured steps."""
    for site, recipes in DECLARED:
        optimizer = next(case.optimizer for case in KINDS.values() if case.model == site.model)  # the model's own first
        by_recipe = {
            row["scheme"]: statistics.median(math.inf if count is None else count for count in row["steps"])
            for row in steps
            if (row["model"], row["optimizer"], row["accumulate"]) == (site.model, optimizer, 1)
        }
        there = [cell for cell in cells if asdict(site).items() <= cell.items()]
        seconds = {cell["recipe"]: by_recipe[cell["recipe"]] * cell["measured_ms"] / 1e3 for cell in there}
        if seconds.keys() >= set(recipes):
            best = min(seconds, key=lambda recipe: seconds[recipe])
            pick = next(recipe for recipe in recipes if str(parse(recipe)) == there[0]["pick"])
            over = seconds[pick] / seconds[best] - 1
            yield {**asdict(site), "pick": pick, "best": best, "over_best": over, "seconds": seconds}


def main() -> None:
    """Run or summarize."""
    parser = argparse.ArgumentParser(prog="python tools/foretold.py", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    runs = modes.add_parser("run")
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--sites", type=int, default=12)
    runs.add_argument("--cells-each", type=int, default=5)
    runs.add_argument("--models", default="cnn,resnet20,gpt-tiny,gpt-small")
    runs.add_argument("--text", type=Path, required=True)
    runs.add_argument("--images", type=Path, help="CIFAR-10, which resnet20 learns")
    runs.add_argument("--declared", action="store_true", help="the declared sites instead of drawn ones")
    runs.add_argument("--out", type=Path, required=True)
    sums = modes.add_parser("summarize")
    sums.add_argument("lines", type=Path, nargs="+")
    sums.add_argument("--steps", type=Path, help="a record of steps to a target")
    args = parser.parse_args()
    if args.mode == "summarize":
        cells = [json.loads(line) for path in args.lines for line in path.read_text().splitlines()]
        print(json.dumps(summarize(cells)))
        for pick in picks(cells, json.loads(args.steps.read_text())["rows"]) if args.steps else ():
            print(json.dumps(pick))
        return
    drawn = draw(args.seed, args.sites, args.cells_each, args.models.split(","))
    with args.out.open("a") as out:
        for site, recipes in DECLARED if args.declared else drawn:
            for cell in run(site, recipes, site.words(args.text, args.images)):
                out.write(json.dumps(cell) + "\n")
                out.flush()
                print(
                    f"{cell['model']} {cell['hosts']} {cell['link']} {cell['delay']} {cell['recipe']}: "
                    f"{cell['predicted_ms']:.1f} foretold, {cell['measured_ms']:.1f} measured",
                    file=sys.stderr,
                    flush=True,
                )


if __name__ == "__main__":
    main()
