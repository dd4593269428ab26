"""Losses over steps: how far apart two runs are, counted in steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise


def smoothed(losses: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each loss but the first and last as the mean of itself and its neighbours."""
    return [
        (losses[i][0], statistics.fmean(loss for _, loss in losses[i - 1 : i + 2])) for i in range(1, len(losses) - 1)
    ]


def steps_to(target: float, losses: Sequence[tuple[float, float]]) -> float | None:
    """Where the smoothed loss first reaches a target, between two evaluations; None where it does not."""
    for (before, higher), (after, lower) in pairwise(smoothed(losses)):
        if lower <= target:
            if higher <= target:
                return before
            return before + (after - before) * (higher - target) / (higher - lower)
    return None
