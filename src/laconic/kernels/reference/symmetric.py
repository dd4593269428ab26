"""Products of matrices that come out symmetric, of which a GPU need compute only half."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.contract import kernel


@kernel
def symmetric_product_(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    factors: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    addend: Tensor | None = None,
    diagonal: float = 0.0,
) -> None:
    """out = alpha * factor * left @ right^T + beta * addend + diagonal * I, to rounding, for stacks of matrices.

    `factors` are float32, one for each matrix. The caller knows that the result is symmetric, as is `addend`: X X^T is,
    and so is a product of polynomials of one such.
    """
    if addend is None or factors is not None:
        torch.baddbmm(out, left, right.mT, beta=0, alpha=alpha, out=out)
        if factors is not None:
            out.mul_(factors[:, None, None])
        if addend is not None:
            out.add_(addend, alpha=beta)
    else:
        torch.baddbmm(addend, left, right.mT, beta=beta, alpha=alpha, out=out)
    out.diagonal(dim1=1, dim2=2).add_(diagonal)
