"""The union of the workers' choices: how it grows with their number, by score, on a real training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from laconic.session import Session
from laconic_lab.errors import TaskError
from laconic_lab.train import Job, work_in_process
from laconic_lab.train.result import Result

_FIRST_STEPS = 2  # left out: the past says nothing yet


@dataclass(frozen=True)
class Union:
    """One score among M workers; means over the steps of a run, after the first two."""

    score: str
    workers: int
    union: float  # |U|/k
    independent: float  # |U|/k for choices that have nothing in common
    server_bytes_out: int  # a step: the answer, once for each worker
    server_bytes_in: int
    loss: float  # of the model, over the test data, at the end


def unions(
    job: Job, rho: float, scores: Sequence[str], num_workers: Sequence[int], say: Callable[[str], None]
) -> list[Union]:
    """Train job.steps steps under each score among each number of virtual workers, with one server."""
    if job.steps is None or job.steps <= _FIRST_STEPS:
        raise TaskError(f"--steps is {job.steps}; give more than {_FIRST_STEPS}")
    measured = []
    for workers in num_workers:
        for score in scores:
            scheme = f"overlap:rho={rho},score={score},strength=0,down_rho=0"  # what scores do, and no cut
            one = replace(job, scheme=scheme, workers=workers, servers=1, in_process=True, eval_every=10**9)
            union = _union(one, rho, score)
            measured.append(union)
            say(f"{score} among {workers}: |U|/k {union.union:.2f}, {union.server_bytes_out:,} bytes a step")
    return measured


def _union(job: Job, rho: float, score: str) -> Union:
    seen: list[tuple[int, int, int, int]] = []
    results: list[Result] = []

    def after_step(step: int, session: Session) -> None:
        stats = session.stats()
        up = stats.by_kind["up"].bytes_out
        seen.append((stats.num_answered, stats.num_pushed, stats.by_kind["down"].bytes_in, up))

    work_in_process(job, results.append, lambda line: None, after_step)
    answered, sent, down, up = (last - first for last, first in zip(seen[-1], seen[_FIRST_STEPS - 1], strict=True))
    steps = len(seen) - _FIRST_STEPS
    return Union(
        score=score,
        workers=job.workers,
        union=answered / max(1, sent),
        independent=(1 - (1 - rho) ** job.workers) / rho,
        server_bytes_out=down * job.workers // steps,
        server_bytes_in=up * job.workers // steps,
        loss=results[0].loss,
    )
