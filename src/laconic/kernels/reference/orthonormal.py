"""Orthonormal bases of thin matrices, many at once."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.registry import kernel

RIDGE = 1e-12  # of unit columns; what float32 leaves of a column that depends on the others is 1e-15
SMALLEST = 1e-300  # a square that is not zero


@kernel
def orthonormal_(bases: Tensor, factors: Tensor, places: Tensor, rank: int) -> None:
    """Overwrite bases with what spans the same as the factors: B = F T, where T^T (F^T F + a ridge) T = 1.

    Both are flat float32; each row of `places`, int64, is (start of B, start of F, rows of both), and a start may be
    the same place. F's columns are first brought to length 1. A column that depends on the others comes out short,
    never as NaN, so that B B^T stays within a projection; one of zeros leaves the basis as it was, or it would be zero
    for ever. Sums are float64, in any order: what that changes float32 hides, but for one entry in millions.
    """
    for start, first, rows in places.tolist():
        basis = bases[start : start + rows * rank].view(rows, rank)
        factor = factors[first : first + rows * rank].view(rows, rank)
        filled = torch.where(factor.any(0), factor, basis).double()
        gram = filled.mT @ filled
        inverse_lengths = gram.diagonal().clamp_min(SMALLEST).rsqrt()
        gram *= inverse_lengths * inverse_lengths[:, None]
        gram.diagonal().add_(RIDGE)
        basis.copy_(filled @ (inverse_lengths[:, None] * _inverse_root(gram)))


def _inverse_root(gram: Tensor) -> Tensor:
    """The upper triangular T with T^T G T = 1.

    Elimination takes of each row what those before it have of it, and does the same to 1. torch.linalg would do it
    too, but on a GPU not for the first time in two threads at once.
    """
    rank = len(gram)
    rows = torch.cat([gram, torch.eye(rank, dtype=gram.dtype, device=gram.device)], 1)
    for number in range(rank):
        row = rows[number].mul_(rows[number, number].rsqrt())
        rows[number + 1 :].addcmul_(row[number + 1 : rank, None], row, value=-1)
    return rows[:, rank:].mT
