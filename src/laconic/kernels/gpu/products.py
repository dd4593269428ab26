"""Products of matrices with thin ones, many at once: one pass over all matrices, which programs share block by block.

A library's own products cut such matrices into tiles that are wide where these are thin, and take a launch for each: of
a transformer's layer, 28 MB, M B took 95 us instead of 12, and the two outer products 190 instead of 25.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.checks import check_vector
from laconic.kernels.gpu.launch import launch

_PROGRAMS = 528  # four on each multiprocessor of a large GPU
_MOST_WIDE = 16  # columns of a basis in one pass over its matrix
_PRODUCTS = 64  # that a thread holds
_THREADS = 256
_OPTIONS = {"num_warps": _THREADS // 32}


@triton.jit
def _mine(number_before):
    """The first block of a matrix that is this program's, where so many blocks came before."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - number_before % programs) % programs


@triton.jit
def _place_of(places, number):
    """(start of M, rows, columns, start of B, start of F) of one matrix."""
    place = places + 5 * number
    rows = tl.load(place + 1).to(tl.int32)
    cols = tl.load(place + 2).to(tl.int32)
    return tl.load(place), rows, cols, tl.load(place + 3), tl.load(place + 4)


@triton.jit
def _multiply(
    factors, matrices, bases, places, num_matrices, rank, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """F = M B: a block of rows at a time, along which products add up in place and are summed at the end."""
    before = 0
    for number in range(num_matrices):
        start, rows, cols, of_basis, of_factor = _place_of(places, number)
        basis = bases + of_basis
        num_blocks = tl.cdiv(rows, ROWS)
        for block in range(_mine(before), num_blocks, tl.num_programs(0)):
            row = block * ROWS + tl.arange(0, ROWS)
            lines = matrices + start + row[:, None].to(tl.int64) * cols
            for first in range(0, rank, WIDE):
                column = first + tl.arange(0, WIDE)
                products = tl.zeros([ROWS, WIDE, COLS], tl.float32)
                for left in range(0, cols, COLS):
                    col = left + tl.arange(0, COLS)
                    m = tl.load(lines + col[None, :], mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0)
                    inside = (column < rank)[:, None] & (col < cols)[None, :]
                    b = tl.load(basis + col[None, :] * rank + column[:, None], mask=inside, other=0.0)
                    products += m[:, None, :] * b[None, :, :]
                inside = (row < rows)[:, None] & (column < rank)[None, :]
                at = of_factor + row[:, None] * rank + column[None, :]
                tl.store(factors + at, tl.sum(products, 2), mask=inside)
        before += num_blocks


@triton.jit
def _multiply_transposed(
    factors, matrices, bases, places, num_matrices, rank, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """F = M^T B: a block of columns at a time."""
    before = 0
    for number in range(num_matrices):
        start, rows, cols, of_basis, of_factor = _place_of(places, number)
        basis = bases + of_basis
        num_blocks = tl.cdiv(cols, COLS)
        for block in range(_mine(before), num_blocks, tl.num_programs(0)):
            col = block * COLS + tl.arange(0, COLS)
            for first in range(0, rank, WIDE):
                column = first + tl.arange(0, WIDE)
                products = tl.zeros([ROWS, WIDE, COLS], tl.float32)
                for top in range(0, rows, ROWS):
                    row = top + tl.arange(0, ROWS)
                    lines = matrices + start + row[:, None].to(tl.int64) * cols
                    m = tl.load(lines + col[None, :], mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0)
                    inside = (row < rows)[:, None] & (column < rank)[None, :]
                    b = tl.load(basis + row[:, None] * rank + column[None, :], mask=inside, other=0.0)
                    products += m[:, None, :] * b[:, :, None]
                inside = (column < rank)[:, None] & (col < cols)[None, :]
                at = of_factor + col[None, :] * rank + column[:, None]
                tl.store(factors + at, tl.sum(products, 0), mask=inside)
        before += num_blocks


@triton.jit
def _settle(
    matrices,
    out,
    bases,
    own,
    mean,
    places,
    num_matrices,
    rank,
    factor,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    before = 0
    for number in range(num_matrices):
        start, rows, cols, of_basis, of_factor = _place_of(places, number)
        basis = bases + of_basis
        across = tl.cdiv(cols, COLS)
        num_blocks = tl.cdiv(rows, ROWS) * across
        for block in range(_mine(before), num_blocks, tl.num_programs(0)):
            row = block // across * ROWS + tl.arange(0, ROWS)[:, None]
            col = block % across * COLS + tl.arange(0, COLS)[None, :]
            inside = (row < rows) & (col < cols)
            at = start + row.to(tl.int64) * cols + col
            m = tl.load(matrices + at, mask=inside, other=0.0)
            gone = tl.zeros([ROWS, COLS], tl.float32)
            heard = tl.zeros([ROWS, COLS], tl.float32)
            for column in range(rank):
                if TRANSPOSED:
                    left = tl.load(basis + row * rank + column, mask=row < rows, other=0.0)
                    gone += left * tl.load(own + of_factor + col * rank + column, mask=col < cols, other=0.0)
                    heard += left * tl.load(mean + of_factor + col * rank + column, mask=col < cols, other=0.0)
                else:
                    right = tl.load(basis + col * rank + column, mask=col < cols, other=0.0)
                    gone += tl.load(own + of_factor + row * rank + column, mask=row < rows, other=0.0) * right
                    heard += tl.load(mean + of_factor + row * rank + column, mask=row < rows, other=0.0) * right
            tl.store(matrices + at, m - gone, mask=inside)
            tl.store(out + at, (factor * heard).to(out.dtype.element_ty), mask=inside)
        before += num_blocks


def thin_products_(
    factors: Tensor, matrices: Tensor, bases: Tensor, places: Tensor, rank: int, *, transposed: bool
) -> None:
    _check(factors, matrices, bases, places)
    wide = min(triton.next_power_of_2(rank), _MOST_WIDE)
    tile = _THREADS * _PRODUCTS // wide
    cols = 16 if transposed else 256  # of a row, so that enough programs have a share
    kernel = _multiply_transposed if transposed else _multiply
    if len(places):
        arguments = (factors, matrices, bases, places, len(places), rank)
        launch(kernel, (_PROGRAMS, 1), *arguments, tile // cols, cols, wide, **_OPTIONS)


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
    _check(own, matrices, bases, places)
    check_vector(mean, torch.float32, len(own), "mean")
    check_vector(out, out.dtype, len(matrices), "out")
    if len(places):
        arguments = (matrices, out, bases, own, mean, places, len(places), rank, float(factor))
        launch(_settle, (_PROGRAMS, 1), *arguments, transposed, 16, 256, **_OPTIONS)


def _check(factors: Tensor, matrices: Tensor, bases: Tensor, places: Tensor) -> None:
    for name, vector in (("factors", factors), ("matrices", matrices), ("bases", bases)):
        check_vector(vector, torch.float32, len(vector), name)
    check_vector(places, torch.int64, 5 * len(places), "places", dims=2)
