"""The result of a run, and how it goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from laconic.cli import say
from laconic_lab.figures import Record, Source, Values, of_run, sentences
from laconic_lab.train.loop import TrainingLoop
from laconic_lab.train.measurement import mean_ms, median_times

WATCHED = "LACONIC_WATCHED"  # set where the launcher shows the run
DIVERGED = 3  # exit code of a run whose loss was no number in the end


@dataclass(frozen=True)
class Result(Record):
    """One run's figures; bytes and ratio are means over the workers."""

    noun: ClassVar[str] = "result"

    scheme: str
    accuracy: float
    loss: float
    steps: int
    seconds: float
    step_ms: float  # median
    split_ms: dict[str, float]  # adds up to step_ms: compute is what of a step lay outside the other four
    bytes_out: int  # per worker, all steps
    bytes_in: int
    ratio: float | None
    skipped_steps: int
    diverged_at: int | None  # the step from which on the loss was no number; the run ended at the next evaluation
    lost_workers: dict[str, str]  # that died while the others went on, and how
    figures: Values


def beside_dense(ratio: float | None) -> str:
    """A ratio in words; nothing where there is none, or where dense would have sent as much."""
    if not ratio or f"{ratio:.1f}" == "1.0":
        return ""
    return f"{ratio:.1f}x fewer" if ratio > 1 else f"{1 / ratio:.1f}x more"


def summarize(loop: TrainingLoop) -> Result:
    """Sum up a run; all workers call it."""
    stats = loop.learner.stats(ages=True)
    evaluation = loop.last_evaluation
    # The interface's count begins with this process, so it has no match where a resumed run's bytes go further back.
    facts = loop.facts if not loop.bytes_before["dense"] else []
    seen = [sum(fact.get(f"link_bytes_{direction}", 0) for fact in facts) for direction in ("out", "in")]
    own = [*loop.bytes_so_far().values(), *seen]
    total = loop.group.total(torch.tensor(own, dtype=torch.float64))
    out, into, dense, seen_out, seen_in = (round(each / loop.group.num_living) for each in total.tolist())
    end = loop.group.end_facts()
    ends = loop.group.gather([loop.seconds, loop.peak_memory_bytes])
    slowest, peak = (max(column) for column in zip(*ends, strict=True))
    step_ms, split_ms = median_times(loop.facts)
    workers = {
        "peak_memory_bytes": round(peak) or None,
        "tokens_per_s": loop.tokens_per_s(step_ms),
        "mean_step_ms": mean_ms(loop.facts),
        "link_bytes_out": seen_out or None,
        "link_bytes_in": seen_in or None,
        "seconds_slowest": None if loop.group.shares_clock else slowest,
    }
    sources = {Source.STATS: vars(stats), Source.EVALUATION: evaluation, Source.WORKERS: workers}
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
        ratio=dense / out if out else None,
        skipped_steps=stats.skipped_steps,
        diverged_at=loop.diverged_at,
        lost_workers=end.lost_workers,
        figures=of_run(sources, end.servers),
    )


def show(loop: TrainingLoop, fact: dict[str, Any], say: Callable[[str], None] = say) -> None:
    """Say how a run goes after an evaluation, unless its launcher shows that."""
    if WATCHED in os.environ:
        return
    measure = loop.job.measure
    facts = [f"{measure.noun} {measure.text(fact[measure.name])}"]
    stats = loop.learner.stats()
    if loop.facts:
        last = loop.facts[-1]
        facts += [f"train loss {last['loss']:.3f}", f"{last['ms']:.0f} ms"]
        facts += [f"{rate:,.0f} tokens/s"] if (rate := loop.tokens_per_s(last["ms"])) else []
        beside = beside_dense(stats.ratio)
        facts += [f"{last['bytes_out']:,} bytes out" + (f" ({beside} so far)" if beside else "")]
    facts += sentences(vars(stats))
    say(f"{loop.job.scheme}: step {fact['step']}/{loop.course.num_steps}, {', '.join(facts)}")
