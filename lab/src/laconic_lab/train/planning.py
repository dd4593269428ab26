"""A job or a script planned instead of trained; and the step at which a run reaches a loss."""

from __future__ import annotations

import functools
import runpy
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import laconic
from laconic.planning import Plan, plan
from laconic_lab.errors import TaskError
from laconic_lab.tasks import Data
from laconic_lab.train.course import Course
from laconic_lab.train.ddp import in_ddp
from laconic_lab.train.job import Job

Losses = list[tuple[float, float]]  # (step, validation loss)


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
        self, make: Callable[[DistributedDataParallel, list[torch.optim.Optimizer], Callable[[], None]], Plan]
    ) -> None:
        self._make = make
        self._may_go_on = threading.Semaphore(0)
        self._has_stepped = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._models: list[DistributedDataParallel] = []
        self._optimizers: list[torch.optim.Optimizer] = []  # of the script's model
        self.num_steps = 0
        self.plan: Plan | None = None
        self.error: BaseException | None = None

    def note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Find the optimizers of the script's model; torch calls this after every optimizer.step().

        The plan gets its steps by a wrapper around the first one's step(), where nothing iterates over hooks: it adds
        some of its own.
        """
        if optimizer in self._optimizers:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        model = next((m for m in self._models if any(id(p) in stepped for p in m.parameters())), None)
        if model is None:
            return
        self._optimizers.append(optimizer)
        if len(self._optimizers) > 1:
            return
        whole_step = optimizer.step

        @functools.wraps(whole_step)
        def step(_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            result = whole_step(*args, **options)
            self._wait_for_plan(model)
            return result

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def note_model(self, model: DistributedDataParallel) -> None:
        """Remember a model that the script has wrapped."""
        self._models.append(model)

    def _wait_for_plan(self, model: DistributedDataParallel) -> None:
        """Let the plan go on, until it wants another step."""
        self.num_steps += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(model,), daemon=True)
            self._thread.start()
        else:
            self._has_stepped.release()
        self._may_go_on.acquire()
        if self.plan is not None or self.error is not None:
            raise _PlanIsMade

    def _run(self, model: DistributedDataParallel) -> None:
        device = next(model.parameters()).device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self.plan = self._make(model, self._optimizers, self._step)
        except BaseException as error:
            self.error = error
        self._may_go_on.release()

    def _step(self) -> None:
        self._may_go_on.release()
        self._has_stepped.acquire()


def plan_script(words: Sequence[str], candidates: Sequence[str], steps: int) -> Plan:
    """Run a training script as it is, and plan with its steps from the third on; a call that all workers make.

    The script wraps its model in DistributedDataParallel and steps an optimizer over it, or several. It ends where the
    plan is made, so that it neither trains nor writes what it would write after that.
    """
    script = _Script(lambda model, optimizers, step: plan(model, optimizers, step, schemes=candidates, steps=steps))
    made = DistributedDataParallel.__init__

    def remember(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
        made(model, *args, **options)
        script.note_model(model)

    def refuse(*_: Any, **__: Any) -> None:
        raise TaskError(f"{words[0]} uses laconic already; plan it as it was before, with a DistributedDataParallel")

    own = laconic.follow, laconic.attach
    laconic.follow = laconic.attach = refuse  # type: ignore[assignment]
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
        laconic.follow, laconic.attach = own
        DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
    if script.error is not None:
        raise script.error
    if script.plan is None:
        raise TaskError(
            f"{words[0]} ended after {script.num_steps} steps over a model in DistributedDataParallel; a plan takes "
            "about 100 of one optimizer, so let it train longer for once"
        )
    return script.plan
