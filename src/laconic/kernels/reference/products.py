"""Products of matrices with thin ones, many at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laconic.kernels.registry import kernel


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
    for (matrix, here), basis, (gone, heard) in views:
        if transposed:
            matrix.addmm_(basis, gone.mT, alpha=-1)
            here.copy_(basis @ heard.mT)
        else:
            matrix.addmm_(gone, basis.mT, alpha=-1)
            here.copy_(heard @ basis.mT)


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
