"""Orthonormal bases of thin matrices, many at once: a program for each."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.checks import check_vector
from laconic.kernels.gpu.launch import launch
from laconic.kernels.reference.orthonormal import RIDGE, SMALLEST
from laconic.kernels.reference.orthonormal import orthonormal_ as orthonormal_by_torch_

_RIDGE = tl.constexpr(RIDGE)
_SMALLEST = tl.constexpr(SMALLEST)
_MOST_RANK = 16  # whose products of one row are 256 numbers
_PRODUCTS = 4096  # of some rows, that a program holds at once


@triton.jit
def _rows_of(matrix, first, rows, rank, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Some rows of a matrix, zeros around them; where they lie, and which of it is the matrix."""
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    inside = (row < rows) & (column < rank)
    at = row * rank + column
    return tl.load(matrix + at, mask=inside, other=0.0), at, inside


@triton.jit
def _inverse_root(gram, WIDE: tl.constexpr):
    """T transposed, with T^T G T = 1: each row takes what those before it have of it, and does the same to 1."""
    row = tl.arange(0, WIDE)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    turn = tl.where(row == column, 1.0, 0.0).to(tl.float64)
    for number in tl.static_range(WIDE):
        is_it = row == number
        pivot_row = tl.sum(tl.where(is_it, gram, 0.0), 0)[None, :]
        turned_row = tl.sum(tl.where(is_it, turn, 0.0), 0)[None, :]
        unit = 1.0 / tl.sqrt(tl.sum(tl.where(column == number, pivot_row, 0.0), 1))[:, None]
        pivot_row *= unit
        turned_row *= unit
        share = tl.sum(tl.where(row == column, pivot_row, 0.0), 1)[:, None]  # the same numbers, down instead of across
        gram = tl.where(is_it, pivot_row, tl.where(row > number, gram - share * pivot_row, gram))
        turn = tl.where(is_it, turned_row, tl.where(row > number, turn - share * turned_row, turn))
    return turn


@triton.jit
def _orthonormal(bases, factors, places, rank, ROWS: tl.constexpr, WIDE: tl.constexpr):
    place = places + 3 * tl.program_id(0)
    basis = bases + tl.load(place)
    factor = factors + tl.load(place + 1)
    rows = tl.load(place + 2).to(tl.int32)

    filled = tl.zeros([1, WIDE], tl.int32)
    for first in range(0, rows, ROWS):
        x, _, _ = _rows_of(factor, first, rows, rank, ROWS, WIDE)
        filled = tl.maximum(filled, tl.max((x != 0).to(tl.int32), 0)[None, :])

    gram = tl.zeros([WIDE, WIDE], tl.float64)
    for first in range(0, rows, ROWS):
        x, _, _ = _rows_of(factor, first, rows, rank, ROWS, WIDE)
        before, _, _ = _rows_of(basis, first, rows, rank, ROWS, WIDE)
        x = tl.where(filled > 0, x, before).to(tl.float64)
        gram += tl.sum(x[:, :, None] * x[:, None, :], 0)

    row = tl.arange(0, WIDE)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    squares = tl.sum(tl.where(row == column, gram, 0.0), 0)[None, :]
    across = 1.0 / tl.sqrt(tl.maximum(squares, _SMALLEST))
    down = tl.sum(tl.where(row == column, across, 0.0), 1)[:, None]
    gram = gram * (across * down) + tl.where(row == column, _RIDGE, 0.0)
    turn = _inverse_root(gram, WIDE) * across

    for first in range(0, rows, ROWS):
        x, at, inside = _rows_of(factor, first, rows, rank, ROWS, WIDE)
        before, _, _ = _rows_of(basis, first, rows, rank, ROWS, WIDE)
        x = tl.where(filled > 0, x, before).to(tl.float64)
        tl.store(basis + at, tl.sum(x[:, None, :] * turn[None, :, :], 2).to(tl.float32), mask=inside)


def orthonormal_(bases: Tensor, factors: Tensor, places: Tensor, rank: int) -> None:
    """Overwrite bases with what spans the same as the factors; a wide one by torch."""
    check_vector(bases, torch.float32, bases.numel(), "bases")
    check_vector(factors, torch.float32, factors.numel(), "factors")
    check_vector(places, torch.int64, 3 * len(places), "places", dims=2)
    wide = triton.next_power_of_2(rank)
    if wide > _MOST_RANK:
        orthonormal_by_torch_(bases, factors, places, rank)
    elif len(places):
        launch(_orthonormal, (len(places), 1), bases, factors, places, rank, max(1, _PRODUCTS // wide**2), wide)
