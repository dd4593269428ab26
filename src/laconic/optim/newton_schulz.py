"""Newton-Schulz orthogonalizes many matrices at once, by batched matrix products alone.

    A = X X^T ; X <- (a I + b A + c A^2) X          five times, starting from X / |X|

All singular values go to about one (0.65 to 1.2): the coefficients (Jordan, 2024) grow small ones as fast as a quintic
can, and an optimizer needs no more. A tall X is multiplied from the right, by a polynomial of X^T X, so that no
matrix is ever transposed in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST = 1e-30  # of a squared norm: a matrix of zeros stays zero
_LONG = 1.5  # sides from which on composing two steps takes fewer operations, 4c + 10r against 8c + 4r (times r^2)


def is_long(rows: int, cols: int) -> bool:
    """Return whether a matrix of this size is multiplied by two steps' polynomials at once."""
    return max(rows, cols) > _LONG * min(rows, cols)


def orthogonalize(stacks: Sequence[Tensor], *, steps: int = 5, scales: Sequence[float] | None = None) -> list[Tensor]:
    """Return scale * U V^T (about) of every matrix U S V^T in the stacks.

    A long matrix is multiplied by the product of two steps' polynomials, which is computed on its small side: at 1:4
    this saves a fifth of the operations. Then its Gram matrix is computed anew: one that is carried on for five steps
    in bfloat16 gets negative eigenvalues, and they diverge. In pairs the result is as near to float32's as before.
    Stacks, of (number, rows, cols), have one type, device and smaller side, and are all long or none.
    """
    stacks = list(stacks)
    counts = [len(stack) for stack in stacks]
    side = min(stacks[0].shape[1:])
    grams = stacks[0].new_empty(sum(counts), side, side)
    scales = [1.0] * len(stacks) if scales is None else scales
    blocks = [2] * (steps // 2) + [1] * (steps % 2) if is_long(*stacks[0].shape[1:]) else [1] * steps
    for number, num_steps in enumerate(blocks):
        for stack, share in zip(stacks, grams.split_with_sizes(counts), strict=True):
            wide = stack if stack.shape[1] == side else stack.mT
            torch.bmm(wide, wide.mT, out=share)
        if number == 0:
            trace = grams.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32).clamp_(min=_SMALLEST)
            squared = trace[:, None, None].to(grams.dtype)  # |X|^2, so that X itself needs no pass of its own
            grams.div_(squared)
        polynomial = _composed(grams, num_steps)
        if number == 0:
            polynomial.mul_(squared.rsqrt())
        by = scales if number == len(blocks) - 1 else [1.0] * len(stacks)
        stacks = [_times(*each) for each in zip(polynomial.split_with_sizes(counts), stacks, by, strict=True)]
    return stacks


def _composed(grams: Tensor, num_steps: int) -> Tensor:
    """Return the polynomial, as a matrix, by which so many steps multiply X."""
    polynomial = factor = _polynomial(grams)
    for _ in range(num_steps - 1):
        grams = torch.bmm(torch.bmm(factor, grams), factor)
        factor = _polynomial(grams)
        polynomial = torch.bmm(factor, polynomial)
    return polynomial


def _polynomial(grams: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    result = torch.baddbmm(grams, grams, grams, beta=b, alpha=c)
    result.diagonal(dim1=1, dim2=2).add_(a)
    return result


def _times(factor: Tensor, stack: Tensor, scale: float) -> Tensor:
    wide = stack.shape[1] <= stack.shape[2]
    left, right = (factor, stack) if wide else (stack, factor)
    return torch.empty_like(stack).baddbmm_(left, right, beta=0, alpha=scale)
