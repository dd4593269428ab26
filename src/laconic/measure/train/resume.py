"""A checkpoint beside the run that would go on from it: what does not fit, and what is worth a remark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.errors import TaskError
from laconic.measure.tasks import TASKS
from laconic.measure.train.job import Job
from laconic.recipes import parse
from laconic.scheme import AnyScheme, Scheme

_MUST_BE_THE_SAME = ("task", "model")


def settings(job: Job) -> dict[str, Any]:
    """What decides how a run goes, defaults filled in, by the name of its option."""
    task = TASKS[job.task]
    return {
        "task": job.task,
        "model": job.model or next(iter(task.models)),
        "scheme": job.scheme,
        "batch": job.batch or task.batch,
        "lr": job.lr or task.lr,
        "momentum": task.momentum if job.momentum is None else job.momentum,
        "seed": job.seed,
        "labels-per-worker": job.labels_per_worker,
    }


def check_resume(job: Job, num_steps: int, step: int, states: Sequence[Mapping[str, Any]]) -> None:
    """Raise, with the option to change, unless the job can go on from these states."""
    if step >= num_steps:
        raise TaskError(f"{step} steps are done already; give --steps more than that to go on")
    before = _settings_of(states)
    for name in _MUST_BE_THE_SAME:
        if name in before and before[name] != settings(job)[name]:
            fits = f"--{name} {before[name]}"
            raise TaskError(f"the checkpoint in {job.out} was made with {fits}; give that, or another --out")
    saved = states[0]["session"]["scheme"]
    if _keeps(parse(saved)) != _keeps(parse(job.scheme)):
        raise TaskError(
            f"the checkpoint in {job.out} was made with --scheme {saved}, which keeps other things than {job.scheme}; "
            "give that, or another --out"
        )


def remark(job: Job, states: Sequence[Mapping[str, Any]]) -> str:
    """The settings that are no longer those the run began with, in one line; nothing where there are none."""
    before, now = _settings_of(states), settings(job)
    changed = [name for name in before if name in now and before[name] != now[name]]
    if not changed:
        return ""
    old, new = (", ".join(f"--{name} {of[name]}" for name in changed) for of in (before, now))
    return f"this run began with {old} and goes on with {new}"


def _settings_of(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the worker that led wrote down."""
    return next((dict(state["settings"]) for state in states if "settings" in state), {})


def _keeps(scheme: AnyScheme) -> tuple[str, ...]:
    """The kinds of tensors a session keeps; PyTorch's own hooks go on under the very same scheme only."""
    if scheme.of_what == "models":
        return ("a model of each worker's own",)
    return scheme.memory.kinds if isinstance(scheme, Scheme) else (str(scheme),)
