"""What a run came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from laconic.measure.train.loop import TrainingLoop
from laconic.measure.train.measured import median_times

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
    diverged_at: int | None  # the step from which on the loss was no number; the run ended at the next evaluation
    seconds_slowest: float | None = None  # of the worker that took longest
    worst_accuracy: float | None = None  # of gossip's replicas, of which `accuracy` is the mean's
    consensus_distance: float | None = None  # ||x_i - mean|| / ||mean||, root mean square, before the last average
    union: float | None = None  # |U|/k at a server, over all steps since the last resume
    oldest_residual: int | None = None
    never_sent: float | None = None
    server_bytes_out: int | None = None  # of all dedicated servers, all steps since the last resume
    server_link_bytes_out: int | None = None  # what their interfaces saw, evaluation and checkpoints included
    server_held_bytes: int | None = None  # what they keep between steps
    lost_workers: dict[str, str] = field(default_factory=dict)  # that died while the others went on, and how

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def beside_dense(ratio: float | None) -> str:
    """A ratio in words; nothing where there is none, or where dense would have sent as much."""
    if not ratio or f"{ratio:.1f}" == "1.0":
        return ""
    return f"{ratio:.1f}x fewer" if ratio > 1 else f"{1 / ratio:.1f}x more"


def _sum(servers: Sequence[dict[str, Any]], name: str) -> int | None:
    found = [server[name] for server in servers if server.get(name) is not None]
    return sum(found) if found else None


def summarize(loop: TrainingLoop) -> Result:
    """Sum up a run; all workers call it."""
    stats = loop.learner.stats(ages=True)
    evaluation = loop.last_evaluation
    # The interface's count begins with this process, so it has no match where a resumed run's bytes go further back.
    facts = loop.facts if not loop.bytes_before["dense"] else []
    seen = [sum(fact.get(f"link_bytes_{way}", 0) for fact in facts) for way in ("out", "in")]
    mine = [*loop.bytes_so_far().values(), *seen]
    total = loop.group.total(torch.tensor(mine, dtype=torch.float64))
    out, into, dense, seen_out, seen_in = (round(each / loop.group.num_living) for each in total.tolist())
    end = loop.group.end_facts()
    slowest = max(seconds for (seconds,) in loop.group.gather([loop.seconds]))
    step_ms, split_ms = median_times(loop.facts)
    return Result(
        scheme=str(stats.scheme),
        accuracy=evaluation["accuracy"],
        loss=evaluation["loss"],
        steps=loop.steps_done,
        seconds=loop.seconds,
        step_ms=step_ms,
        split_ms=split_ms,
        bytes_out=out,
        bytes_in=into,
        link_bytes_out=seen_out or None,
        link_bytes_in=seen_in or None,
        ratio=dense / out if out else None,
        skipped_steps=stats.skipped_steps,
        seconds_slowest=None if loop.group.shares_clock else slowest,
        worst_accuracy=evaluation.get("worst_accuracy"),
        consensus_distance=evaluation.get("consensus_distance"),
        diverged_at=loop.diverged_at,
        union=stats.union,
        oldest_residual=stats.oldest_residual,
        never_sent=stats.never_sent,
        server_bytes_out=_sum(end.servers, "bytes_out"),
        server_link_bytes_out=_sum(end.servers, "link_bytes_out"),
        server_held_bytes=_sum(end.servers, "held_bytes"),
        lost_workers=end.lost_workers,
    )
