"""How many more steps each recipe needs than bf16 to reach the same validation loss, by kind of model and optimizer.

    python tools/penalties.py run DIR --data TEXT
    python tools/penalties.py summarize DIR

`run` trains each recipe in DIR/KIND/RECIPE/SEED with `laconic train`, at a constant rate so that a step does not depend
on the run's length, ends a run that has reached the target, and passes over those that are there already. The target is
the mean over seeds of bf16's loss after the kind's steps. With accumulation, steps are counted in micro-batches, and
AdamW's rate grows with the root of their number.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from laconic.recipes import parse
from laconic.scheme import OuterScheme, Scheme
from laconic_lab.errors import TaskError
from laconic_lab.records import RECORDS, make_writable, read
from laconic_lab.tasks import TASKS
from laconic_lab.train import Job
from laconic_lab.train.mps import shared_gpu
from laconic_lab.train.planning import smoothed, steps_to
from results import RESULTS, this_machine, write_result

NAME = "steps-to-target"
LONGEST = 3  # times the target's steps, after which a run that has not reached it ends
_BASE_LONGEST = 1.5  # of bf16's own runs: some seeds are slower than their mean
_HOPELESS = 2  # seeds that do not reach the target, after which no further one is tried
_WARM_UP = 20
_LEAST_WARM_UP = 2
_POLL_S = 0.5
_ABOUT = "about.json"
_BASE = "bf16"
_RECIPES = (
    *(_BASE, "dense", "topk:rho=0.01", "topk:rho=0.001", "chunked", "dgc:rho=0.01", "overlap:rho=0.01"),
    *("maxnorm:bits=4", "maxnorm:bits=2", "multiscale", "sign"),
    *("lowrank:rank=4", "lowrank:rank=4,form=alternating", "torch-powersgd:rank=4"),
    *("local:every=16", "diloco:every=32", "streaming", "streaming:every=32", "streaming:every=64", "streaming:bits=2"),
    *("muloco", "muloco:bits=2", "sparseloco", "noloco", "gossip"),
)
_ACCUMULATED = (2, 4, 8, 16)


@dataclass(frozen=True)
class ModelCase:
    """A model and the optimizer that trains it."""

    kind: str
    task: str
    model: str
    optimizer: str
    steps: int  # of bf16 to the target
    eval_every: int  # steps, or micro-steps
    lr: float | None = None  # where the optimizer is not the model's own

    @property
    def name(self) -> str:
        return f"{self.model}-{self.optimizer}"


KINDS = {
    kind.name: kind
    for kind in (
        ModelCase("convolutional", "fashion-mnist", "cnn", "sgd", 200, 10),
        ModelCase("transformer", "chars", "gpt-tiny", "adamw", 300, 20),
        ModelCase("convolutional", "fashion-mnist", "cnn", "adamw", 200, 10, lr=1e-3),
        ModelCase("transformer", "chars", "gpt-tiny", "muon", 300, 20, lr=4e-3),
    )
}


@dataclass(frozen=True)
class PenaltyRun:
    """One recipe on one kind from one seed."""

    kind: ModelCase
    scheme: str
    accumulate: int
    seed: int

    @property
    def is_base(self) -> bool:
        return self.scheme == _BASE and self.accumulate == 1

    def folder(self, home: Path) -> Path:
        return home / self.kind.name / f"{self.scheme}-x{self.accumulate}" / str(self.seed)

    def job(self, home: Path, data: Path | None, device: str) -> Job:
        """What is trained; a vote and what lives in DDP or between peers have demands of their own."""
        model = TASKS[self.kind.task].model(self.kind.model)
        scale = self.accumulate
        steps = math.ceil(self.kind.steps * (_BASE_LONGEST if self.is_base else LONGEST) / scale)
        scheme = parse(self.scheme)
        job = Job(
            task=self.kind.task,
            model=self.kind.model,
            data=data if self.kind.task == "chars" else None,
            scheme=self.scheme,
            steps=steps,
            batch=scale * model.training.batch,
            accumulate=scale,
            schedule="constant",
            warmup=max(_LEAST_WARM_UP, _WARM_UP // scale),
            eval_every=max(1, round(self.kind.eval_every / scale)),
            seed=self.seed,
            device=device,
            in_process=isinstance(scheme, Scheme | OuterScheme),
            out=self.folder(home),
            no_checkpoint=True,
            quiet=True,
        )
        if self.kind.lr is not None:
            job = replace(job, optimizer=self.kind.optimizer, lr=self.kind.lr)
        if scale == 1 or self.kind.optimizer != "adamw":
            return (
                job  # SGD's rate is near the most that the CNN bears: twice it, a batch of 4 or more never gets there
            )
        return replace(job, lr=math.sqrt(scale) * job.training.lr)

    def losses(self, home: Path) -> list[tuple[float, float]]:
        """(step, validation loss) so far, steps in micro-batches; the last may be infinite."""
        folder = self.folder(home)
        facts = read(folder, "eval") if (folder / RECORDS).exists() else ()
        return [(fact["step"] * self.accumulate, math.inf if fact["loss"] is None else fact["loss"]) for fact in facts]

    def steps(self, home: Path, target: float | None) -> float | None:
        """Steps to the target; None where it is not reached, or not known yet."""
        return None if target is None else steps_to(target, self.losses(home))

    def is_over(self, home: Path, target: float | None) -> bool:
        """Whether nothing is left to be found out."""
        losses = self.losses(home)
        longest = self.kind.steps * (_BASE_LONGEST if self.is_base else LONGEST)
        if losses and (losses[-1][0] >= longest or math.isinf(losses[-1][1])):
            return True
        return not self.is_base and self.steps(home, target) is not None


def runs(kinds: Sequence[ModelCase], seeds: range) -> Iterator[PenaltyRun]:
    """All of them: the base first, then seed by seed, so that what is cut short has whole seeds.

    Kinds under an optimizer that is not the model's own come last.
    """
    everything = [(scheme, 1) for scheme in _RECIPES] + [(_BASE, number) for number in _ACCUMULATED]
    made = [
        PenaltyRun(kind, scheme, accumulate, seed)
        for seed in seeds
        for scheme, accumulate in everything
        for kind in kinds
        if scheme != "sign" or kind.lr is None  # a vote has an optimizer of its own
        if not (scheme.startswith("dgc") and kind.optimizer == "muon")  # two momenta
    ]
    yield from sorted(made, key=lambda run: (run.kind.lr is not None, not run.is_base))


def target_of(kind: ModelCase, seeds: range, home: Path) -> float | None:
    """The mean over seeds of bf16's smoothed loss after the kind's steps; None until all of them are there."""
    found = []
    for seed in seeds:
        at = dict(smoothed(PenaltyRun(kind, _BASE, 1, seed).losses(home)))
        if kind.steps not in at:
            return None
        found.append(at[kind.steps])
    return statistics.fmean(found)


def train(run: PenaltyRun, *, home: Path, data: Path | None, device: str, seeds: range, deadline: float) -> None:
    """Train one run as far as it is needed, or till the clock is at `deadline`, unless it is there."""
    folder = run.folder(home)
    start = time.monotonic()
    target = target_of(run.kind, seeds, home)
    earlier = [replace(run, seed=seed) for seed in seeds[:_HOPELESS] if seed < run.seed]
    failed = [one for one in earlier if one.is_over(home, target) and one.steps(home, target) is None]
    if start > deadline or run.is_over(home, target) or len(failed) == _HOPELESS:
        return
    make_writable(folder)
    command = [sys.executable, "-m", "laconic", "train", *run.job(home, data, device).arguments()]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(_POLL_S)
            if time.monotonic() > deadline or run.is_over(home, target_of(run.kind, seeds, home)):
                process.terminate()
                process.wait()
    step, loss = (run.losses(home) or [(0, math.nan)])[-1]
    took = f"{time.monotonic() - start:.0f} s"
    print(f"{folder.relative_to(home)}: {took}, loss {loss:.4f} at step {step}", file=sys.stderr, flush=True)


def summary(kinds: Sequence[ModelCase], seeds: range, home: Path) -> list[dict[str, Any]]:
    """A row for each recipe on each kind; a seed that was cut short is left out, one that never came there is None."""
    rows = []
    for kind in kinds:
        target = target_of(kind, seeds, home)
        if target is None:
            continue
        base = {seed: PenaltyRun(kind, _BASE, 1, seed).steps(home, target) for seed in seeds}
        for run in [run for run in runs([kind], seeds) if run.seed == seeds[0]]:
            ended = [
                (one.steps(home, target), base[one.seed])
                for one in (replace(run, seed=seed) for seed in seeds)
                if one.is_over(home, target) and base[one.seed]
            ]
            if ended:
                rows.append({**_about(run), "target": target, **_factors(ended)})
    return rows


def _about(run: PenaltyRun) -> dict[str, Any]:
    kind = run.kind
    of_kind = {"task": kind.task, "model": kind.model, "kind": kind.kind, "optimizer": kind.optimizer}
    return {"scheme": run.scheme, "accumulate": run.accumulate, **of_kind}


def _factors(ended: Sequence[tuple[float | None, float | None]]) -> Mapping[str, Any]:
    """Steps by seed, and their median, least and most over the base's; None is more than LONGEST."""
    over = sorted(steps / base if steps and base else math.inf for steps, base in ended)
    found = {"factor": statistics.median(over), "factor_low": over[0], "factor_high": over[-1]}
    return {
        "steps": [None if steps is None else round(steps, 1) for steps, _ in ended],
        **{name: None if math.isinf(value) else round(value, 3) for name, value in found.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or write the record."""
    parser = argparse.ArgumentParser(prog="python tools/penalties.py", description="Steps to a target.")
    parser.add_argument("action", choices=("run", "summarize"))
    parser.add_argument("home", type=Path, help="folder of all runs")
    parser.add_argument("--kind", action="append", choices=KINDS, help="all, unless some are named")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--name", default=NAME, help="of the record")
    parser.add_argument("--data", type=Path, help="the text that chars learns")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--only", default="", help="a regular expression: recipes that it finds")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="after which runs are cut short")
    args = parser.parse_args(arguments)
    kinds = [KINDS[name] for name in args.kind or KINDS]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    if args.action == "run":
        _run(args, kinds, seeds)
    else:
        _summarize(args, kinds, seeds)
    return 0


def _run(args: argparse.Namespace, kinds: Sequence[ModelCase], seeds: range) -> None:
    wanted = [run for run in runs(kinds, seeds) if re.search(args.only, f"{run.scheme}-x{run.accumulate}")]
    machine = this_machine()
    if args.device == "cuda":
        machine += f", {torch.cuda.get_device_name()}"
    make_writable(args.home)
    command = f"python tools/penalties.py run DIR --data TEXT --device {args.device} --seeds {args.seeds}"
    if args.first_seed:
        command += f" --first-seed {args.first_seed}"
    (args.home / _ABOUT).write_text(json.dumps({"machine": machine, "command": command}), encoding="utf-8")
    deadline = time.monotonic() + args.max_seconds
    one = partial(train, home=args.home, data=args.data, device=args.device, seeds=seeds, deadline=deadline)
    job = Job(device=args.device)
    with shared_gpu(job, args.jobs, partial(print, file=sys.stderr)), ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, wanted))


def _summarize(args: argparse.Namespace, kinds: Sequence[ModelCase], seeds: range) -> None:
    rows = summary(kinds, seeds, args.home)
    if not rows:
        raise TaskError(f"{args.home} holds no whole runs of {_BASE}; `penalties run {args.home}` makes them")
    about = json.loads((args.home / _ABOUT).read_text(encoding="utf-8"))
    lengths = ", ".join(f"{kind.steps} of {kind.name}" for kind in kinds)
    what = (
        f"Steps to {_BASE}'s own validation loss (its mean after {lengths}) over {_BASE}'s, 4 workers: the median "
        f"over seeds, the least and the most; constant rates; steps of accumulated batches are counted in "
        f"micro-batches; - is more than {LONGEST} times as many. Where there are fewer steps than seeds, the others "
        "were not tried. sign trains by a vote of its own, without AdamW."
    )
    print(write_result(RESULTS, args.name, what=what, rows=rows, **about))


if __name__ == "__main__":
    sys.exit(main())
