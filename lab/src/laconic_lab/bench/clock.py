"""Times of rival pieces of work, taken in turns, so that a noisy machine is noisy to all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def median_seconds(
    works: Mapping[str, Callable[[], Any]], device: str = "cpu", rounds: int = 7, calls: int = 1
) -> dict[str, float]:
    """Median over rounds of the seconds that a call of each work takes; on CUDA by events, over `calls` in a row."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append((_cuda_seconds if device == "cuda" else _cpu_seconds)(work, calls))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _cpu_seconds(work: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def _cuda_seconds(work: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
