"""What a run came to."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from laconic.records import WARM_UP_STEPS
from laconic.session import PHASES
from laconic.train.trainer import Trainer

DIVERGED = 3  # exit code of a run whose loss was no number in the end


@dataclass(frozen=True)
class Result:
    """One run's figures; bytes and ratio are means over the workers."""

    scheme: str
    accuracy: float
    loss: float
    steps: int
    seconds: float
    step_ms: float  # median
    split_ms: dict[str, float]  # adds up to step_ms: compute is what of a step lay outside the other four
    bytes_out: int  # per worker, all steps
    bytes_in: int
    link_bytes_out: int | None  # the same, as the network interface saw it; None on loopback
    link_bytes_in: int | None
    ratio: float | None
    skipped_steps: int
    seconds_slowest: float  # of the worker that took longest
    worst_accuracy: float | None  # of gossip's replicas, of which `accuracy` is the mean's
    consensus_distance: (
        float | None
    )  # ||x_i - mean|| / ||mean||, root mean square over the replicas, before the last average
    lost: dict[str, str]  # peers that died, as rank 0 saw it
    diverged_at: int | None  # the step from which on the loss was no number; the run ended at the next evaluation

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def beside_dense(ratio: float | None) -> str:
    """A ratio in words; nothing where there is none, or where dense would have sent as much."""
    if not ratio or f"{ratio:.1f}" == "1.0":
        return ""
    return f"{ratio:.1f}x fewer" if ratio > 1 else f"{1 / ratio:.1f}x more"


def summarize(trainer: Trainer) -> Result:
    """Sum up a run; all ranks call it."""
    stats = trainer.session.stats()
    # The interface's count begins with this process, so it has no match where a resumed run's bytes go further back.
    facts = trainer.facts if not trainer.bytes_before["dense"] else []
    seen = [sum(fact.get(f"link_bytes_{way}", 0) for fact in facts) for way in ("out", "in")]
    mine = [*trainer.bytes_so_far().values(), *seen]
    everyone = trainer.gather(mine)
    out, into, dense, seen_out, seen_in = (round(statistics.fmean(column)) for column in zip(*everyone, strict=True))
    timed = trainer.facts[WARM_UP_STEPS:] or trainer.facts
    step_ms = statistics.median(fact["ms"] for fact in timed)
    split = {phase: statistics.median(fact[f"{phase}_ms"] for fact in timed) for phase in PHASES}
    return Result(
        scheme=str(stats.scheme),
        accuracy=trainer.last_evaluation["accuracy"],
        loss=trainer.last_evaluation["loss"],
        steps=trainer.steps_done,
        seconds=trainer.seconds,
        step_ms=step_ms,
        split_ms={"compute": max(0.0, step_ms - sum(split.values())), **split},
        bytes_out=out,
        bytes_in=into,
        link_bytes_out=seen_out or None,
        link_bytes_in=seen_in or None,
        ratio=dense / out if out else None,
        skipped_steps=stats.skipped_steps,
        seconds_slowest=max(seconds for (seconds,) in trainer.gather([trainer.seconds])),
        worst_accuracy=trainer.last_evaluation.get("worst_accuracy"),
        consensus_distance=trainer.last_evaluation.get("consensus_distance"),
        lost={str(rank): why for rank, why in getattr(stats, "lost", {}).items()},
        diverged_at=trainer.diverged_at,
    )
