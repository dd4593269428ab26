"""Two bits a value: its sign, and which of its group's two sizes it is nearer to. A row of a program's tile is a group.

Sizes are whole numbers of 2^-40 of the largest |v|, in float64: their sums are exact in any order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.contract import check_vector, words_of
from laconic.kernels.reference import lloyd

_TILE = 2048  # entries that a program holds, as float64
_WORDS = tl.constexpr(256)  # that a program reads
_PER_WORD = tl.constexpr(lloyd.LLOYD_VALUES_PER_WORD)
_ROUNDS = tl.constexpr(lloyd.LLOYD_ROUNDS)
_UNITS = tl.constexpr(lloyd.LLOYD_UNITS)
_WHOLE = tl.constexpr(2.0**52)  # what is added to it is rounded to a whole number, ties to even
_SHARE_BITS = tl.constexpr(lloyd.LLOYD_SHARE_BITS)
_SHARES = tl.constexpr(1 << lloyd.LLOYD_SHARE_BITS)
_DROPPED_BITS = tl.constexpr(lloyd.LLOYD_DROPPED_BITS)
_HALF = tl.constexpr(1 << (lloyd.LLOYD_DROPPED_BITS - 1))
_ONE = tl.constexpr(lloyd.LLOYD_ONE)
_NO_SIZE = tl.constexpr(lloyd.LLOYD_NO_SIZE)
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # nothing contracts a product and a sum


@triton.jit
def _whole(x):
    """A float64 in [0, 2^52), rounded."""
    return (x + _WHOLE) - _WHOLE


@triton.jit
def _lane_of(low, high):
    bits = (high / _UNITS).to(tl.float32).to(tl.int32, bitcast=True)
    size = -(((bits + _HALF) >> _DROPPED_BITS) - _ONE)
    share = _whole(low / tl.maximum(high, 1.0) * _SHARES).to(tl.int32)
    return tl.minimum(tl.maximum(size, 0), _NO_SIZE) << _SHARE_BITS | tl.minimum(share, _SHARES - 1)


@triton.jit
def _sizes_of(lane):
    size = lane >> _SHARE_BITS
    high = (-(size - _ONE) << _DROPPED_BITS).to(tl.float32, bitcast=True)
    high = tl.where(size == _NO_SIZE, 0.0, high)
    return (lane & (_SHARES - 1)).to(tl.float32) * high * (1.0 / _SHARES), high


@triton.jit(do_not_specialize=["n", "num_words"])
def _encode(x, top, lanes, words, n, num_words, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = row.to(tl.int64) * GROUP
    place = tl.arange(0, WIDTH)[None, :]
    at = start[:, None] + place
    value = tl.load(x + at, mask=(place < GROUP) & (at < n), other=0.0)
    units = _whole(tl.abs(value).to(tl.float64) * (1.0 / tl.load(top).to(tl.float64) * _UNITS))
    count = tl.minimum(tl.maximum(n - start, 1), GROUP).to(tl.float64)
    total = tl.sum(units, 1)
    low = total / count
    high = low
    for _ in tl.static_range(_ROUNDS):
        is_larger = units > tl.floor((low + high) / 2)[:, None]
        larger = tl.sum(tl.where(is_larger, units, 0.0), 1)
        num_larger = tl.sum(is_larger.to(tl.int32), 1).to(tl.float64)
        low = (total - larger) / (count - num_larger)
        high = tl.maximum(low, larger / tl.maximum(num_larger, 1.0))
    lane = _lane_of(low, high)
    tl.store(lanes + row, lane, mask=start < n)
    small, large = _sizes_of(lane)
    middle = (small.to(tl.float64) * _UNITS + large.to(tl.float64) * _UNITS) / 2
    code = (value < 0).to(tl.int32) | (units > middle[:, None]).to(tl.int32) << 1
    code = tl.reshape(code << 2 * (place % _PER_WORD), [ROWS, WIDTH // _PER_WORD, _PER_WORD])
    number = tl.arange(0, WIDTH // _PER_WORD)[None, :]
    word = start[:, None] // _PER_WORD + number
    tl.store(words + word, tl.sum(code, 2), mask=(number < GROUP // _PER_WORD) & (word < num_words))


@triton.jit(do_not_specialize=["num_words"])
def _decode(lanes, words, top, out, num_words, GROUP: tl.constexpr):
    word = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    inside = word < num_words
    low, high = _sizes_of(tl.load(lanes + word // (GROUP // _PER_WORD), mask=inside, other=0))
    scale = tl.load(top)
    place = tl.arange(0, _PER_WORD)[None, :]
    code = tl.load(words + word, mask=inside, other=0)[:, None] >> 2 * place
    size = tl.where((code & 2) != 0, (high * scale)[:, None], (low * scale)[:, None])
    value = (size.to(tl.int32, bitcast=True) ^ code << 31).to(tl.float32, bitcast=True)
    tl.store(out + word.to(tl.int64)[:, None] * _PER_WORD + place, value, mask=inside[:, None])


def encode_lloyd(values: Tensor, top: Tensor, group: int) -> tuple[Tensor, Tensor]:
    n = values.numel()
    lloyd.check_lloyd_group(group)
    check_vector(values, torch.float32, n, "values")
    check_vector(top, torch.float32, 1, "top", dims=0)
    num_groups = -(-n // group)
    lanes = values.new_empty(num_groups, dtype=torch.int32)
    words = values.new_empty(words_of(2 * n), dtype=torch.int32)
    width = triton.next_power_of_2(group)
    rows = max(1, _TILE // width)
    grid = (-(-num_groups // rows),)
    if n:
        _encode[grid](values, top, lanes, words, n, words.numel(), GROUP=group, WIDTH=width, ROWS=rows, **_OPTIONS)
    return lanes, words


def decode_lloyd(lanes: Tensor, words: Tensor, top: Tensor, group: int) -> Tensor:
    num_words = words.numel()
    lloyd.check_lloyd_group(group)
    values = torch.empty(lloyd.LLOYD_VALUES_PER_WORD * num_words, dtype=torch.float32, device=words.device)
    check_vector(lanes, torch.int32, -(-values.numel() // group), "lanes")
    check_vector(words, torch.int32, num_words, "words")
    check_vector(top, torch.float32, 1, "top", dims=0)
    if num_words:
        _decode[(-(-num_words // _WORDS.value),)](lanes, words, top, values, num_words, GROUP=group, **_OPTIONS)
    return values
