"""What is noted of steps, and what many of them come to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from laconic.measure.records import WARM_UP_STEPS
from laconic.session import PHASES, Stats


def step_fact(step: int, loss: float, seconds: float, before: Stats, after: Stats) -> dict[str, Any]:
    """One step, by the session's stats on both sides of it."""
    return {
        "step": step,
        "loss": loss,
        "ms": 1e3 * seconds,
        **{f"{phase}_ms": 1e3 * (after.seconds[phase] - before.seconds[phase]) for phase in PHASES},
        "bytes_out": after.bytes_out - before.bytes_out,
        "bytes_in": after.bytes_in - before.bytes_in,
    }


def median_times(facts: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """(ms of a step, its split), the first steps left out: compute is what of a step lay outside the other four."""
    timed = facts[WARM_UP_STEPS:] or facts
    step_ms = statistics.median(fact["ms"] for fact in timed)
    split = {phase: statistics.median(fact[f"{phase}_ms"] for fact in timed) for phase in PHASES}
    return step_ms, {"compute": max(0.0, step_ms - sum(split.values())), **split}
