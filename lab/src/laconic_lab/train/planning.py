"""A job planned instead of trained: its own step, what would pay, and what schemes cost in steps by short runs."""

from __future__ import annotations

import functools
import math
import runpy
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic.planning import Candidate, Penalty, Plan, answer, candidate, plan
from laconic_lab.errors import TaskError
from laconic_lab.tasks import Data
from laconic_lab.train.course import Course
from laconic_lab.train.ddp import in_ddp
from laconic_lab.train.job import Job

Losses = list[tuple[float, float]]  # (step, validation loss), steps in micro-batches
LEAST_STEPS = 24  # two between evaluations
_EVALUATIONS = 12
_PROBED = 3  # candidates beside bf16
_PROBE_S = 300.0  # for all runs together, as far as that is foreseen
_JUDGED = 3  # lowest losses, whose factors lie apart by what chance does

# A job's options that no plan depends on.
NOT_PLANNED = (
    *("scheme", "auto", "servers", "server_timeout", "epochs", "flipped", "in_process", "eval_every"),
    *("no_pipeline", "no_checkpoint", "resume", "quiet", "out"),
)


def probe(
    job: Job,
    planned: Plan,
    num_steps: int,
    train: Callable[[Job], Losses],
    slowest: Callable[[float], float] = lambda own: own,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan again, with the steps factors of its soonest candidates taken from runs of so many steps of this job.

    A call that all workers make; `train` trains a job to its end, `slowest` is the largest of everyone's numbers. What
    is foreseen to end after five minutes is left out, and that is said.
    """
    start = time.perf_counter()
    plain = candidate("bf16")
    step_s = {plain: _step_s(planned)} | {candidate(row.scheme): row.step_ms / 1e3 for row in planned.rows}
    others = [one for one in step_s if one != plain]
    losses_of: dict[Candidate, Losses] = {}
    stretch = 1.0  # a run over its steps: what evaluating adds
    for one in (plain, *others[:_PROBED]):
        begun_s = slowest(time.perf_counter() - start)
        foreseen_s = num_steps * step_s[one]
        if begun_s + stretch * foreseen_s > _PROBE_S:
            say(f"{one} is not probed: {num_steps} steps would take {stretch * foreseen_s:.0f} s; give --probe fewer")
            if one == plain:
                return planned
            continue
        losses_of[one] = _trained(job, one, num_steps, train)
        stretch = max(stretch, (slowest(time.perf_counter() - start) - begun_s) / max(foreseen_s, 1e-9))
    source = f"probed on this job, {num_steps} steps"
    probed = tuple((one, factor_of(losses, losses_of[plain], source)) for one, losses in losses_of.items())
    seconds = planned.seconds + time.perf_counter() - start
    return answer(replace(planned.measured, probed=probed), steps=planned.steps, seconds=seconds)


def _step_s(planned: Plan) -> float:
    """The step time of bf16, where the plan was not asked for it."""
    compute = planned.measured.compute
    return compute.together_s + planned.measured.links.sums.seconds(2 * sum(compute.num_entries))


def _trained(job: Job, under: Candidate, num_steps: int, train: Callable[[Job], Losses]) -> Losses:
    """The losses of a short run under a candidate, at a constant rate, so that a step does not depend on its length."""
    times = under.accumulate
    training = job.training
    short = replace(
        job,
        scheme=str(under.scheme),
        steps=math.ceil(num_steps / times),
        batch=times * training.batch,
        accumulate=times * job.accumulate,
        # AdamW bears a rate that grows with the root of the batch.
        lr=training.lr * (1.0 if training.optimizer == "sgd" else times**0.5),
        schedule="constant",
        warmup=max(1, num_steps // 10 // times),
        eval_every=max(1, num_steps // _EVALUATIONS // times),
    )
    return [(times * step, loss if math.isfinite(loss) else math.inf) for step, loss in train(short)]


def factor_of(losses: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]], source: str) -> Penalty:
    """Steps to a loss over those of bf16 to the same one, for the last three new lowest: median, least and most.

    Where bf16 has not come as far, 1; losses that go up and down are compared by where they were lowest.
    """
    lowest: Losses = []
    for steps, loss in smoothed(losses):
        if not lowest or loss < lowest[-1][1]:
            lowest.append((steps, loss))
    planned = []
    for steps, loss in lowest[-_JUDGED:]:
        steps_of_plain = steps_to(loss, plain)
        planned.append(1.0 if steps_of_plain is None else steps / steps_of_plain)
    if not planned or math.isinf(losses[-1][1]):  # it diverged
        planned = [math.inf]
    return Penalty(max(1.0, statistics.median(planned)), min(planned), max(planned), source)


def smoothed(losses: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each loss but the first and last as the mean of itself and its neighbours."""
    return [
        (losses[i][0], statistics.fmean(loss for _, loss in losses[i - 1 : i + 2])) for i in range(1, len(losses) - 1)
    ]


def steps_to(target: float, losses: Sequence[tuple[float, float]]) -> float | None:
    """The step at which the smoothed loss first reaches a target, between two evaluations; None where it does not."""
    for (before, higher), (after, lower) in pairwise(smoothed(losses)):
        if lower <= target:
            if higher <= target:
                return before
            return before + (after - before) * (higher - target) / (higher - lower)
    return None


@dataclass(frozen=True, kw_only=True)
class PlanJob(Job):
    """A job of which only the plan is asked."""

    more_words: tuple[str, ...] = ()  # of `laconic plan` alone

    def words(self) -> list[str]:
        return ["plan", *self.arguments(without=NOT_PLANNED), *self.more_words]


def plan_here(
    job: Job, data: Data, device: torch.device, group: dist.ProcessGroup | None, candidates: Sequence[str], steps: int
) -> Plan:
    """Plan this worker's share of a job; a call that all workers make."""
    course = Course(job, data, dist.get_rank(group), dist.get_world_size(group))
    model = course.model(device)
    updater = course.updater(model)
    ddp = in_ddp(model, group)
    taken = 0

    def step() -> None:
        nonlocal taken
        updater.optimizer.zero_grad()
        loss = course.backward_(ddp, updater, taken, device, ddp.no_sync)
        updater.apply_()
        taken += 1
        float(loss)  # as in training, where it is noted

    return plan(ddp, updater.optimizer, step, schemes=candidates, steps=steps)


class _PlanIsMade(BaseException):
    """Ends a script in the midst of its loop."""


class _Script:
    """A training script whose steps a plan takes: each lasts to the end of the next optimizer.step().

    The plan has a thread of its own, which runs while the script waits in optimizer.step(), and waits while it runs.
    """

    def __init__(
        self, make: Callable[[DistributedDataParallel, torch.optim.Optimizer, Callable[[], None]], Plan]
    ) -> None:
        self._make = make
        self._may_go_on = threading.Semaphore(0)
        self._has_stepped = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._models: list[DistributedDataParallel] = []
        self._has_optimizer = False
        self.plan: Plan | None = None
        self.error: BaseException | None = None

    def note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Find the optimizer of the script's model; torch calls this after every optimizer.step().

        The plan gets its steps by a wrapper around step(), where nothing iterates over hooks: it adds some of its own.
        """
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        model = next((m for m in self._models if any(id(p) in stepped for p in m.parameters())), None)
        if model is None or self._has_optimizer:
            return
        self._has_optimizer = True
        whole_step = optimizer.step

        @functools.wraps(whole_step)
        def step(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            result = whole_step(*args, **options)
            self._wait_for_plan(model, optimizer)
            return result

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def note_model(self, model: DistributedDataParallel) -> None:
        """Remember a model that the script has wrapped."""
        self._models.append(model)

    def _wait_for_plan(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Let the plan go on, until it wants another step."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(model, optimizer), daemon=True)
            self._thread.start()
        else:
            self._has_stepped.release()
        self._may_go_on.acquire()
        if self.plan is not None or self.error is not None:
            raise _PlanIsMade

    def _run(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        device = next(model.parameters()).device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self.plan = self._make(model, optimizer, self._step)
        except BaseException as error:
            self.error = error
        self._may_go_on.release()

    def _step(self) -> None:
        self._may_go_on.release()
        self._has_stepped.acquire()


def plan_script(words: Sequence[str], candidates: Sequence[str], steps: int) -> Plan:
    """Run a training script as it is, and plan in place of its third step; a call that all workers make.

    The script wraps its model in DistributedDataParallel and steps one optimizer over it. It ends where the plan is
    made, so that it neither trains nor writes what it would write after that.
    """
    script = _Script(lambda model, optimizer, step: plan(model, optimizer, step, schemes=candidates, steps=steps))
    made = DistributedDataParallel.__init__

    def remember(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
        made(model, *args, **options)
        script.note_model(model)

    sys.argv = list(words)  # the script and its arguments
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    DistributedDataParallel.__init__ = remember  # type: ignore[assignment,method-assign]
    hook = register_optimizer_step_post_hook(script.note_step)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except _PlanIsMade:
        pass
    finally:
        hook.remove()
        DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
    if script.error is not None:
        raise script.error
    if script.plan is None:
        raise TaskError(
            f"{words[0]} ended before a plan was made; it must wrap its model in DistributedDataParallel and take "
            "about 100 steps of one optimizer over it"
        )
    return script.plan
