"""A task's job, planned instead of trained: its own step, and what would pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from laconic.planning import Plan, plan
from laconic_lab.tasks import Data
from laconic_lab.train.course import Course
from laconic_lab.train.ddp import in_ddp
from laconic_lab.train.job import Job

# A job's options that no plan depends on.
NOT_PLANNED = (
    *("scheme", "auto", "servers", "server_timeout", "epochs", "max_seconds", "flipped", "in_process", "eval_every"),
    *("no_pipeline", "no_checkpoint", "resume", "tensorboard", "quiet", "out"),
)


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
