"""Modulo codes of values that another worker holds nearly alike, in one pass each: rows of a block, 32 times 8 entries.

Eight codes share whole bytes, so they are moved into one int64, of which those bytes are written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.contract import check_vector
from laconic.kernels.gpu.launch import magnitude_bits
from laconic.kernels.reference.modulo import MODULO_BLOCK

_ROWS = tl.constexpr(8)  # blocks that a program handles
_SHARED = tl.constexpr(MODULO_BLOCK)
_OCTETS = tl.constexpr(MODULO_BLOCK // 8)
_LIMIT = tl.constexpr(float(0x2AAAAA80))  # as in the reference
_WEIGHT = tl.constexpr(2_654_435_767 - (1 << 32))
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # nothing contracts a product and a sum


@triton.jit
def _entries(n):
    """(block of each row, each entry's place in its block, its position) and whether that is under n."""
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    place = 8 * tl.arange(0, _OCTETS)[None, :, None] + tl.arange(0, 8)[None, None, :]
    at = row.to(tl.int64)[:, None, None] * _SHARED + place
    return row, place, at, at < n


@triton.jit
def _octets(row, count, BITS: tl.constexpr):
    """Where the bytes of each eight codes lie, and which of eight bytes there are."""
    octet = row.to(tl.int64)[:, None, None] * _OCTETS + tl.arange(0, _OCTETS)[None, :, None]
    byte = tl.arange(0, 8)[None, None, :]
    return octet * BITS + byte, (byte < BITS) & (octet < count)


@triton.jit
def _quotients(x, inverse, row, at, inside, num_blocks, offset):
    """floor(x/step + offset), and zeros after the last entry."""
    factor = tl.load(inverse + row, mask=row < num_blocks, other=0.0)[:, None, None]
    quotient = tl.load(x + at, mask=inside, other=0.0) * factor + offset
    quotient = tl.floor(tl.minimum(tl.maximum(quotient, -_LIMIT), _LIMIT)).to(tl.int32)
    return tl.where(inside, quotient, 0)


@triton.jit
def _sum_of(q, place):
    """The weighted sum of each block; it wraps, so that the order does not matter."""
    weighted = (q * (place * _WEIGHT | 1)).to(tl.int64)
    return tl.sum(tl.sum(weighted, 2), 1).to(tl.int32)


@triton.jit
def _pack(lanes, codes, row, count, BITS: tl.constexpr):
    lane = tl.arange(0, 8)[None, None, :].to(tl.int64)
    word = tl.sum((lanes & ((1 << BITS) - 1)).to(tl.int64) << (BITS * lane), 2)[:, :, None]
    at, inside = _octets(row, count, BITS)
    tl.store(codes + at, (word >> (8 * lane)).to(tl.uint8), mask=inside)


@triton.jit
def _unpack(codes, row, count, BITS: tl.constexpr):
    lane = tl.arange(0, 8)[None, None, :].to(tl.int64)
    at, inside = _octets(row, count, BITS)
    word = tl.sum(tl.load(codes + at, mask=inside, other=0).to(tl.int64) << (8 * lane), 2)[:, :, None]
    return (word >> (BITS * lane)).to(tl.int32) & ((1 << BITS) - 1)


@triton.jit(do_not_specialize=["n", "num_blocks"])
def _changes(x, last, n, num_blocks, changes, sizes):
    row, _, at, inside = _entries(n)
    here = tl.load(x + at, mask=inside, other=0.0)
    change = magnitude_bits(here - tl.load(last + at, mask=inside, other=0.0))
    largest = tl.max(tl.max(change, 2), 1)
    tl.store(changes + row, largest.to(tl.float32, bitcast=True), mask=row < num_blocks)
    largest = tl.max(tl.max(magnitude_bits(here), 2), 1)
    tl.store(sizes + row, largest.to(tl.float32, bitcast=True), mask=row < num_blocks)


@triton.jit(do_not_specialize=["n", "num_blocks", "count"])
def _encode(x, inverse, n, num_blocks, count, offset, codes, sums, BITS: tl.constexpr):
    row, place, at, inside = _entries(n)
    q = _quotients(x, inverse, row, at, inside, num_blocks, offset)
    tl.store(sums + row, _sum_of(q, place), mask=row < num_blocks)
    _pack(q, codes, row, count, BITS)


@triton.jit(do_not_specialize=["n", "num_blocks", "count"])
def _compare(
    x, inverse, steps, codes, sums, n, num_blocks, count, offset, moves, differences, peaks, BITS: tl.constexpr
):  # fmt: skip
    HALF: tl.constexpr = 1 << (BITS - 1)
    MOST: tl.constexpr = HALF // 2 - 1
    row, place, at, inside = _entries(n)
    q = _quotients(x, inverse, row, at, inside, num_blocks, offset)
    away = ((_unpack(codes, row, count, BITS) - q + HALF) & (2 * HALF - 1)) - HALF
    away = tl.where(inside, away, 0)
    peak = tl.max(tl.max(tl.abs(away), 2), 1)
    stated = tl.load(sums + row, mask=row < num_blocks, other=0)
    alike = (stated == _sum_of(q + away, place)) & (peak < HALF)
    away = tl.where(alike[:, None, None], tl.minimum(tl.maximum(away, -MOST), MOST), 0)
    step = tl.load(steps + row, mask=row < num_blocks, other=0.0)[:, None, None]
    tl.store(moves + at, away.to(tl.float32) * (step * 0.5), mask=inside)
    _pack(away, differences, row, count, BITS - 1)
    tl.store(peaks + row, tl.where(alike, peak, -1).to(tl.int8), mask=row < num_blocks)


@triton.jit(do_not_specialize=["n", "num_blocks", "count"])
def _decode(codes, steps, n, num_blocks, count, moves, BITS: tl.constexpr):
    HALF: tl.constexpr = 1 << (BITS - 1)
    row, _, at, inside = _entries(n)
    difference = (_unpack(codes, row, count, BITS) ^ HALF) - HALF
    step = tl.load(steps + row, mask=row < num_blocks, other=0.0)[:, None, None]
    tl.store(moves + at, difference.to(tl.float32) * (step * -0.5), mask=inside)


def largest_changes(x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    n, num_blocks, grid = _sizes(x.numel())
    check_vector(x, torch.float32, n, "x")
    check_vector(last, torch.float32, n, "last")
    changes, sizes = x.new_empty(2, num_blocks)
    if n:
        _changes[grid](x, last, n, num_blocks, changes, sizes, **_OPTIONS)
    return changes, sizes


def encode_modulo(x: Tensor, steps: Tensor, offset: float, bits: int) -> tuple[Tensor, Tensor]:
    n, num_blocks, grid = _sizes(x.numel())
    check_vector(x, torch.float32, n, "x")
    check_vector(steps, torch.float32, num_blocks, "steps")
    count = -(-n // 8)
    codes = x.new_empty(count * bits, dtype=torch.uint8)
    sums = x.new_empty(num_blocks, dtype=torch.int32)
    if n:
        _encode[grid](x, 1.0 / steps, n, num_blocks, count, offset, codes, sums, BITS=bits, **_OPTIONS)
    return codes, sums


def compare_modulo(
    x: Tensor, codes: Tensor, sums: Tensor, steps: Tensor, offset: float, bits: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    n, num_blocks, grid = _sizes(x.numel())
    count = -(-n // 8)
    moves = torch.empty_like(x) if out is None else out
    check_vector(x, torch.float32, n, "x")
    check_vector(codes, torch.uint8, count * bits, "codes")
    check_vector(sums, torch.int32, num_blocks, "sums")
    check_vector(steps, torch.float32, num_blocks, "steps")
    check_vector(moves, torch.float32, n, "out")
    differences = x.new_empty(count * (bits - 1), dtype=torch.uint8)
    peaks = x.new_empty(num_blocks, dtype=torch.int8)
    if n:
        _compare[grid](
            x, 1.0 / steps, steps, codes, sums, n, num_blocks, count, offset, moves, differences, peaks,
            BITS=bits, **_OPTIONS,
        )  # fmt: skip
    return moves, differences, peaks


def decode_differences(codes: Tensor, steps: Tensor, n: int, bits: int, *, out: Tensor | None = None) -> Tensor:
    n, num_blocks, grid = _sizes(n)
    count = -(-n // 8)
    moves = steps.new_empty(n) if out is None else out
    check_vector(codes, torch.uint8, count * bits, "codes")
    check_vector(steps, torch.float32, num_blocks, "steps")
    check_vector(moves, torch.float32, n, "out")
    if n:
        _decode[grid](codes, steps, n, num_blocks, count, moves, BITS=bits, **_OPTIONS)
    return moves


def _sizes(n: int) -> tuple[int, int, tuple[int]]:
    """n, the blocks that hold so many entries, and the programs for those."""
    num_blocks = -(-n // MODULO_BLOCK)
    return n, num_blocks, (-(-num_blocks // _ROWS.value),)
