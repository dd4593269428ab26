"""Orthonormal bases of thin matrices, and products of matrices with thin ones, many at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laconic.kernels.contract import kernel

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


@kernel
def thin_products_(
    factors: Tensor, matrices: Tensor, bases: Tensor, places: Tensor, rank: int, *, transposed: bool
) -> None:
    """F = M B, or M^T B, of each matrix by its basis, which has `rank` columns.

    All are flat float32; each row of `places`, int64, is (start of M, rows, columns, start of B, start of F). Sums are
    float32, in any order.
    """
    for (matrix,), basis, (factor,) in _views([matrices], bases, [factors], places, rank, transposed=transposed):
        torch.mm(matrix.mT if transposed else matrix, basis, out=factor)


@kernel
def settle_products_(
    matrices: Tensor,
    out: Tensor,
    bases: Tensor,
    own: Tensor,
    mean: Tensor,
    places: Tensor,
    rank: int,
    *,
    transposed: bool,
    factor: float,
) -> None:
    """M -= F B^T, and out = factor * G B^T; or B F^T and B G^T, for the factors F and G of M^T.

    Places are those of `thin_products_`: F lies in `own` and G in `mean`, and the product in `out` where M is.
    """
    views = _views([matrices, out], bases, [own, mean * factor], places, rank, transposed=transposed)
    for (matrix, here), basis, (own_factor, mean_factor) in views:
        if transposed:
            matrix.addmm_(basis, own_factor.mT, alpha=-1)
            here.copy_(basis @ mean_factor.mT)
        else:
            matrix.addmm_(own_factor, basis.mT, alpha=-1)
            here.copy_(mean_factor @ basis.mT)


def _views(
    matrices: list[Tensor], bases: Tensor, factors: list[Tensor], places: Tensor, rank: int, *, transposed: bool
) -> Iterator[tuple[list[Tensor], Tensor, list[Tensor]]]:
    """What lies at each place in each of the matrices, its basis, and what lies there in each of the factors."""
    for start, rows, cols, basis, factor in places.tolist():
        long, short = (cols, rows) if transposed else (rows, cols)
        yield (
            [each[start : start + rows * cols].view(rows, cols) for each in matrices],
            bases[basis : basis + short * rank].view(short, rank),
            [each[factor : factor + long * rank].view(long, rank) for each in factors],
        )
