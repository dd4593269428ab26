"""Saving a run and going on with it: what does not fit is refused, and what is worth a remark is said."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from laconic import Attached
from laconic.recipes import parse
from laconic.replicas import Follower
from laconic.scheme import AnyScheme, Scheme
from laconic.testing import fault_point
from laconic_lab.errors import TaskError
from laconic_lab.tasks import TASKS
from laconic_lab.train.checkpoint import Checkpoint, find_checkpoint, other_steps, save_checkpoint
from laconic_lab.train.job import Job
from laconic_lab.train.loop import TrainingLoop

_MUST_BE_THE_SAME = ("task", "model", "context", "optimizer")


def save(loop: TrainingLoop) -> None:
    """Write a checkpoint to --out, if there is one; that of a run which then diverged is kept."""
    job = loop.job
    if job.out is None or job.no_checkpoint or not loop.steps_done or loop.diverged_at is not None:
        return
    fault_point("train.save", loop)
    learner = loop.learner
    if isinstance(learner.session, Attached | Follower):
        learner.session.check_replicas_()
    state: dict[str, Any] = {"session": learner.session.state_dict(), "bytes": loop.bytes_so_far()}
    if loop.group.place == 0 or learner.owns_model:
        state |= {"model": learner.model.state_dict(), **learner.updater.state_dict()}
        state |= {"seconds": loop.seconds, "settings": settings(job)}
    about = {"scheme": job.scheme, "num_workers": loop.course.num_workers, "model": layout_of(learner.model)}
    loop.is_saved, failure = save_checkpoint(job.out, loop.steps_done, loop.course.rank, state, loop.group, about)
    if failure:
        print(f"laconic: {failure}", file=sys.stderr, flush=True)


def check_saved(loop: TrainingLoop) -> None:
    """TaskError, on all workers, where the last checkpoint of a run was not saved: a success would hide that."""
    if not loop.is_saved:
        raise TaskError(
            f"step {loop.steps_done} was trained, but not saved in {loop.job.out}; give --out room enough, in a folder "
            "that all hosts share, and train again, with --resume where an earlier checkpoint is there"
        )


def resume_(loop: TrainingLoop) -> None:
    """Load the newest checkpoint in --out into the loop, its model, optimizer and session."""
    job = loop.job
    learner = loop.learner
    rank = loop.course.rank
    assert job.out is not None
    fault_point("train.resume", loop)
    checkpoint = find_checkpoint(job.out, loop.group)
    states = checkpoint.load()
    check_resume(job, loop.course.num_steps, checkpoint, states)
    check_layout(checkpoint, learner.model)
    if loop.group.place == 0:
        for line in filter(None, [*checkpoint.remarks, remark(job, states)]):
            print(f"laconic: {line}", file=sys.stderr, flush=True)
    lead = next(state for state in states if "model" in state)
    if learner.owns_model:
        lead = next((state for state in states if state["session"].get("rank") == rank), lead)
    learner.model.load_state_dict(lead["model"])
    learner.updater.load_state_dict(lead)
    learner.session.load_state_dict([state["session"] for state in states])
    loop.seconds = lead["seconds"]
    loop.steps_done = checkpoint.step
    for direction in loop.bytes_before:  # the number of workers may have changed, so each takes the mean
        loop.bytes_before[direction] = round(sum(state["bytes"][direction] for state in states) / len(states))
    steps = {int(step) for (step,) in loop.group.gather([checkpoint.step])}  # nobody is asked before it has loaded
    if len(steps) > 1:
        raise other_steps(job.out, steps)
    fault_point("train.resumed", loop)


def settings(job: Job) -> dict[str, Any]:
    """The settings that decide how a run goes, defaults filled in, by the name of its option."""
    training = asdict(job.training)
    return {
        "task": job.task,
        "model": job.model or next(iter(TASKS[job.task].models)),
        "scheme": job.scheme,
        **{name.replace("_", "-"): training[name] for name in training},
        "betas": ",".join(str(beta) for beta in job.training.betas),
        "warmup": job.warmup,
        "schedule": job.schedule,
        "accumulate": job.accumulate,
        "amp": job.amp,
        "seed": job.seed,
        "labels-per-worker": job.labels_per_worker,
    }


def check_resume(job: Job, num_steps: int, checkpoint: Checkpoint, states: Sequence[Mapping[str, Any]]) -> None:
    """Raise, with the option to change, unless the job can go on from a checkpoint, whose states these are."""
    if checkpoint.step >= num_steps:
        raise TaskError(f"{checkpoint.step} steps are done already; give --steps more than that to go on")
    before = _settings_of(states)
    for name in _MUST_BE_THE_SAME:
        if name in before and before[name] != settings(job)[name]:
            fits = f"--{name} {before[name]}"
            raise TaskError(f"the checkpoint in {job.out} was made with {fits}; give that, or another --out")
    saved = checkpoint.about["scheme"]
    if not job.auto and _keeps(parse(saved)) != _keeps(parse(job.scheme)):
        raise TaskError(
            f"the checkpoint in {job.out} was made with --scheme {saved}, which keeps other things than {job.scheme}; "
            "give that, or another --out"
        )


def check_layout(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise unless this is the model that was saved: its names, shapes and types."""
    before = checkpoint.about["model"]
    now = layout_of(model)
    other = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
    if other is not None:
        raise TaskError(
            f"{checkpoint.folder} is of another model: {other} is {before.get(other, 'not')} there and "
            f"{now.get(other, 'not')} here; give the options it was made with, or another --out"
        )


def layout_of(model: nn.Module) -> dict[str, str]:
    """Shape and type of everything in a model's state, by name."""
    return {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in model.state_dict().items()}


def remark(job: Job, states: Sequence[Mapping[str, Any]]) -> str:
    """The settings that are no longer those the run began with, in one line; nothing where there are none."""
    before = _settings_of(states)
    now = settings(job)
    changed = [name for name in before if name in now and before[name] != now[name]]
    if not changed:
        return ""
    old, new = (", ".join(f"--{name} {of[name]}" for name in changed) for of in (before, now))
    return f"this run began with {old} and goes on with {new}"


def _settings_of(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that the worker that led wrote down."""
    return next((dict(state["settings"]) for state in states if "settings" in state), {})


def _keeps(scheme: AnyScheme) -> tuple[str, ...]:
    """The kinds of tensors a session keeps; PyTorch's own hooks go on under the very same scheme only."""
    if scheme.of_what != "gradients":
        return ("a model of each worker's own",)
    return scheme.memory.kinds if isinstance(scheme, Scheme) else (str(scheme),)
