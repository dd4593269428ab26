"""The sum of several sparse frames."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from laconic.kernels.registry import kernel


@kernel
def add_at_(total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """total[positions[f]] += values[f] for each frame f in turn, so that everyone who adds them gets the same bits.

    Positions are int32, ascending within a frame and under total.numel(); values are float32.
    """
    for at, what in zip(positions, values, strict=True):
        total.index_add_(0, at, what)
