"""Vectors end to end, sums of two, and the sum of several sparse frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.reference.bits import set_bits, unpack_bits
from laconic.kernels.registry import kernel


@kernel
def join_(out: Tensor, pieces: Sequence[Tensor], addend: Tensor | None = None) -> None:
    """out = the pieces end to end, plus `addend` if given; all float32. A piece may lie where it goes.

    One piece and an addend make a sum of two vectors: join_(out, [a], b).
    """
    torch._foreach_copy_(list(torch.split(out, [piece.numel() for piece in pieces])), list(pieces))
    if addend is not None:
        out.add_(addend)


@kernel
def add_at_(total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """total[positions[f]] += values[f] for each frame f in turn, so that everyone who adds them gets the same bits.

    Positions are int32, ascending within a frame and under total.numel(); values are float32.
    """
    for at, what in zip(positions, values, strict=True):
        total.index_add_(0, at, what)


@kernel
def sum_over_union_(
    total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor], *, take: bool
) -> tuple[Tensor, Tensor]:
    """add_at_, and then (places, sums): where any frame adds, ascending, int32, and the totals there.

    Those become zero if they are to be taken.
    """
    add_at_(total, positions, values)
    places = unpack_bits(set_bits(torch.cat(list(positions)), total.numel()))  # a map of bits, so nothing is sorted
    sums = total.index_select(0, places)
    if take:
        total.index_fill_(0, places.to(torch.int64), 0)
    return places, sums
