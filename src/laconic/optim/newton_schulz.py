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

from laconic import kernels

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST = 1e-15  # of a norm: a matrix of zeros stays zero


def orthogonalize(stacks: Sequence[Tensor], *, steps: int = 5, scales: Sequence[float] | None = None) -> list[Tensor]:
    """Return scale * U V^T (about) of every matrix U S V^T in the stacks.

    Matrices are multiplied by the product of two steps' polynomials, which is computed on their small side: all but X
    itself is symmetric there, and costs half. Then the Gram matrix is computed anew: one that is carried on for five
    steps in bfloat16 gets negative eigenvalues, and they diverge. In pairs the result is as near to float32's.
    Stacks, of (number, rows, cols), have one type, device and smaller side.
    """
    stacks = list(stacks)
    counts = [len(stack) for stack in stacks]
    side = min(stacks[0].shape[1:])
    grams = stacks[0].new_empty(sum(counts), side, side)
    scales = [1.0] * len(stacks) if scales is None else scales
    norms = [torch.linalg.vector_norm(stack, dim=(1, 2), dtype=torch.float32) for stack in stacks]
    inverse = torch.cat(norms).clamp_(min=_SMALLEST).reciprocal_()  # X is divided by its norm in its products
    blocks = [2] * (steps // 2) + [1] * (steps % 2)
    for number, num_steps in enumerate(blocks):
        factors = torch.split(inverse.square(), counts) if number == 0 else [None] * len(stacks)
        for stack, share, factor in zip(stacks, grams.split_with_sizes(counts), factors, strict=True):
            wide = stack if stack.shape[1] == side else stack.mT
            kernels.symmetric_product_(share, wide, wide, factor)
        polynomial = _composed(grams, num_steps, inverse if number == 0 else None)
        by = scales if number == len(blocks) - 1 else [1.0] * len(stacks)
        stacks = [_times(*each) for each in zip(polynomial.split_with_sizes(counts), stacks, by, strict=True)]
    return stacks


def _composed(grams: Tensor, num_steps: int, factors: Tensor | None) -> Tensor:
    """Return the polynomial, as a matrix, by which one or two steps multiply X; times a factor for each."""
    first = _polynomial(grams)
    if num_steps == 1:
        return first if factors is None else first.mul_(factors[:, None, None])
    second = _polynomial(_product(_product(first, grams), first))
    return _product(second, first, factors)


def _polynomial(grams: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    result = torch.empty_like(grams)
    kernels.symmetric_product_(result, grams, grams, alpha=c, beta=b, addend=grams, diagonal=a)
    return result


def _product(one: Tensor, other: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return the product of two polynomials of one matrix, which commute."""
    result = torch.empty_like(one)
    kernels.symmetric_product_(result, one, other, factors)
    return result


def _times(factor: Tensor, stack: Tensor, scale: float) -> Tensor:
    wide = stack.shape[1] <= stack.shape[2]
    left, right = (factor, stack) if wide else (stack, factor)
    return torch.empty_like(stack).baddbmm_(left, right, beta=0, alpha=scale)
