"""Measurements of steps: seconds, bytes by the session's count and by the interface's, and what many come to."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laconic.session import PHASES, Stats
from laconic_lab.records import WARM_UP_STEPS

_INTERFACES = Path("/proc/self/net/dev")


@dataclass
class Spent:
    """Seconds, and the bytes that the network interface saw, by name in records; none where it is not counted."""

    seconds: float = 0.0
    link_bytes: dict[str, int] = field(default_factory=dict)


@contextmanager
def measured() -> Iterator[Spent]:
    """Measure the block; what it spent is known when it has ended."""
    spent = Spent()
    seen_before = interface_bytes()
    start = time.perf_counter()
    yield spent
    spent.seconds = time.perf_counter() - start
    spent.link_bytes = link_bytes_since(seen_before)


@contextmanager
def slowed() -> Iterator[None]:
    """Let the block take longer on a host of a lab that is slow: a sleep by the CPU seconds that it took."""
    slowdown = float(os.environ.get("LACONIC_SLOWDOWN", "1"))
    begun_s = time.process_time()
    yield
    time.sleep((slowdown - 1) * (time.process_time() - begun_s))


def interface_bytes() -> tuple[int, int] | None:
    """(out, in) so far on the interface that Gloo was told to use; None where it is loopback or not named."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name == "lo" or not _INTERFACES.exists():
        return None
    for line in _INTERFACES.read_text().splitlines():
        label, _, counts = line.partition(":")
        if label.strip() == name:
            numbers = counts.split()
            return int(numbers[8]), int(numbers[0])
    return None


def link_bytes_since(before: tuple[int, int] | None) -> dict[str, int]:
    """The bytes that the interface has counted since, by name in records; nothing where it is not counted."""
    now = interface_bytes()
    if now is None or before is None:
        return {}
    return {"link_bytes_out": now[0] - before[0], "link_bytes_in": now[1] - before[1]}


def step_fact(step: int, loss: float, spent: Spent, before: Stats, after: Stats) -> dict[str, Any]:
    """One step, by the session's stats on both sides of it."""
    return {
        "step": step,
        "loss": loss,
        "ms": 1e3 * spent.seconds,
        **{f"{phase}_ms": 1e3 * (after.seconds[phase] - before.seconds[phase]) for phase in PHASES},
        "bytes_out": after.bytes_out - before.bytes_out,
        "bytes_in": after.bytes_in - before.bytes_in,
        **spent.link_bytes,
    }


def mean_ms(facts: Sequence[Mapping[str, Any]]) -> float:
    """The mean of a step, the first ones left out: what a median hides where only every so many steps talk."""
    return statistics.fmean(fact["ms"] for fact in facts[WARM_UP_STEPS:] or facts)


def median_times(facts: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """(ms of a step, its split), the first steps left out: compute is what of a step lay outside the other four."""
    timed = facts[WARM_UP_STEPS:] or facts
    step_ms = statistics.median(fact["ms"] for fact in timed)
    split = {phase: statistics.median(fact[f"{phase}_ms"] for fact in timed) for phase in PHASES}
    return step_ms, {"compute": max(0.0, step_ms - sum(split.values())), **split}
