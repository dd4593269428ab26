"""Bit vectors, lanes of 1 to 31 bits, and Elias-Fano's code, in int32 words, little-endian, from bit 0 up."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import check_rows, check_vector, words_of
from laconic.kernels.gpu.launch import launch

BLOCK = tl.constexpr(256)  # a bucket of 7 M entries has 6,000 words for a frame's positions, and many share them
_SUM_BLOCK = tl.constexpr(2048)  # pairs of words


@triton.jit
def num_ones(word):
    """The number of ones in each uint32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def lowest_one(word):
    """The place of the lowest one in each uint32 that is not zero."""
    return num_ones((word ^ (word - 1)) >> 1)


@triton.jit
def words_and_ranks(words, ends, num_words):
    """This program's words, their places, how many ones come before each, and the most ones that one of them has."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < num_words, other=0).to(tl.uint32, bitcast=True)
    ones = num_ones(word)
    rank = tl.load(ends + tl.program_id(0)).to(tl.int32) - tl.sum(ones, 0) + tl.cumsum(ones, 0) - ones
    return word, at, rank, tl.max(ones, 0)


@triton.jit(do_not_specialize=["count", "num_bits"])
def _set_bits(positions, words, count, num_bits):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.load(positions + at, mask=at < count, other=-1)
    tl.atomic_or(words + (bit >> 5), 1 << (bit & 31), mask=(bit >= 0) & (bit < num_bits), sem="relaxed")


@triton.jit(do_not_specialize=["num_words", "stride"])
def _count_ones(words, counts, num_words, stride):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + row * stride + at, mask=at < num_words, other=0).to(tl.uint32, bitcast=True)
    tl.store(counts + row * tl.num_programs(0) + tl.program_id(0), tl.sum(num_ones(word), 0))


@triton.jit(do_not_specialize=["num_words"])
def _list_ones(words, ends, positions, num_words):
    """Each round takes one bit from every word, so that empty words cost nothing of their own."""
    word, at, rank, most = words_and_ranks(words, ends, num_words)
    for _ in range(most):
        tl.store(positions + rank, at * 32 + lowest_one(word), mask=word != 0)
        rank += 1
        word &= word - 1


@triton.jit
def _sum_of_mixed(low, high, at, num_words):
    """The sum of mix(pair + (at + 1)*g) modulo 2^64, as int64, over the pairs whose first word is there."""
    z = low.to(tl.uint32, bitcast=True).to(tl.uint64) | high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    z += (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)).to(tl.int64, bitcast=True)
    return tl.sum(tl.where(2 * at < num_words, z, 0), 0)


@triton.jit(do_not_specialize=["num_words", "stride"])
def _check_sum(words, totals, num_words, stride):
    """Integers wrap, so that the order of the atomic additions does not matter."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * _SUM_BLOCK + tl.arange(0, _SUM_BLOCK)
    first = words + row * stride + 2 * at
    low = tl.load(first, mask=2 * at < num_words, other=0)
    high = tl.load(first + 1, mask=2 * at + 1 < num_words, other=0)
    tl.atomic_add(totals + row, _sum_of_mixed(low, high, at, num_words), sem="relaxed")


@triton.jit(do_not_specialize=["num_words", "a", "b", "c", "d", "e", "f", "g"])
def _seal(words, total, num_words, a, b, c, d, e, f, g):
    at = tl.program_id(0) * _SUM_BLOCK + tl.arange(0, _SUM_BLOCK)
    low = tl.load(words + 2 * at, mask=2 * at < num_words, other=0)
    high = tl.load(words + 2 * at + 1, mask=2 * at + 1 < num_words, other=0)
    low = tl.where(at == 0, a, tl.where(at == 1, c, tl.where(at == 2, e, tl.where(at == 3, g, low))))
    high = tl.where(at == 0, b, tl.where(at == 1, d, tl.where(at == 2, f, high)))
    tl.store(words + 2 * at, low, mask=at < 4)
    tl.store(words + 2 * at + 1, high, mask=at < 3)
    tl.atomic_add(total, _sum_of_mixed(low, high, at, num_words), sem="relaxed")


def num_blocks(count: int) -> int:
    """The number of blocks of BLOCK that hold that many."""
    return -(-count // int(BLOCK.value))


def count_ones(rows: Tensor) -> Tensor:
    """For each row the number of ones up to the end of each block of words, int64."""
    num_rows, num_words = rows.shape
    counts = torch.empty((num_rows, num_blocks(num_words)), dtype=torch.int32, device=rows.device)
    launch(_count_ones, (counts.shape[1], num_rows), rows, counts, num_words, rows.stride(0))
    return counts.cumsum(1)


def set_bits(positions: Tensor, num_bits: int) -> Tensor:
    """A bit vector as words, with a one at each of the int32 `positions`, in any order and however often given."""
    count = positions.numel()
    check_vector(positions, torch.int32, count, "positions")
    words = torch.zeros(words_of(num_bits), dtype=torch.int32, device=positions.device)
    if count:
        launch(_set_bits, (num_blocks(count), 1), positions, words, count, num_bits)
    return words


def unpack_bits(words: Tensor) -> Tensor:
    """Positions of the ones, ascending, int32; waits for the device, to know how many."""
    num_words = words.numel()
    check_vector(words, torch.int32, num_words, "words")
    if num_words == 0:
        return words.new_empty(0)
    ends = count_ones(words.view(1, -1))[0]
    positions = words.new_empty(int(ends[-1]))
    _list_ones[(num_blocks(num_words),)](words, ends, positions, num_words)
    return positions


def check_sum(words: Tensor) -> Tensor:
    """The sum over i of mix(pair_i + (i + 1)*g) of each row modulo 2^64, int64, 0-d where there is one row."""
    rows = words.view(1, -1) if words.dim() == 1 else words
    num_rows, num_words = rows.shape
    totals = torch.zeros(num_rows, dtype=torch.int64, device=words.device)
    if num_words:
        grid = _num_sum_blocks(num_words), num_rows
        launch(_check_sum, grid, rows, totals, num_words, rows.stride(0))
    return totals.view(words.shape[:-1])


def seal_(words: Tensor, head: Sequence[int]) -> None:
    """Write the seven numbers of a `head` after a frame's first two words, and the sum of all others over those two.

    Those are zero before.
    """
    check_vector(words, torch.int32, words.numel(), "words")
    total, rest = words[:2].view(torch.int64), words[2:]
    launch(_seal, (_num_sum_blocks(rest.numel()), 1), rest, total, rest.numel(), *head)


def _num_sum_blocks(num_words: int) -> int:
    return -(-num_words // (2 * int(_SUM_BLOCK.value)))


@triton.jit(do_not_specialize=["count", "width", "num_words"])
def _pack_lanes(values, words, count, width, num_words):
    """Each word gathers the lanes that touch it, so that no two programs write to one word."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = 32 * word // width
    shift = (lane * width - 32 * word).to(tl.int32)  # the first lane may begin in the word before
    packed = tl.zeros([BLOCK], tl.int32)
    for _ in range(31 // width + 2):
        inside = (word < num_words) & (lane < count) & (shift < 32)
        value = tl.load(values + lane, mask=inside, other=0) & ((1 << width) - 1)
        packed |= tl.where(shift < 0, value >> tl.maximum(-shift, 0), value << (tl.maximum(shift, 0) & 31))
        lane += 1
        shift += width
    tl.store(words + word, packed, mask=word < num_words)


@triton.jit
def lane_at(words, index, width, inside):
    """The lane at each int64 `index`, int32; a lane touches two words at most, and never needs bit 63 of the pair."""
    start = index * width
    shift = start & 31
    low = tl.load(words + (start >> 5), mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(words + (start >> 5) + 1, mask=inside & (shift + width > 32), other=0).to(tl.int64) & 0x7FFFFFFF
    return ((low | (high << 32)) >> shift).to(tl.int32) & ((1 << width) - 1)


@triton.jit(do_not_specialize=["count", "width"])
def _unpack_lanes(words, values, count, width):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + at, lane_at(words, at, width, at < count), mask=at < count)


def pack_into(words: Tensor, values: Tensor, width: int) -> None:
    """Write the low `width` bits of the int32 `values` end to end into `words`, all of which are written."""
    num_words = words.numel()
    if num_words:
        launch(_pack_lanes, (num_blocks(num_words), 1), values, words, values.numel(), width, num_words)


def pack_lanes(values: Tensor, width: int) -> Tensor:
    """Non-negative int32 `values`, each under 2^width and 1 <= width <= 31, end to end."""
    _check_width(width)
    check_vector(values, torch.int32, values.numel(), "values")
    words = values.new_empty(words_of(values.numel() * width))
    pack_into(words, values, width)
    return words


def unpack_lanes(words: Tensor, count: int, width: int) -> Tensor:
    """The inverse of pack_lanes."""
    _check_width(width)
    check_vector(words, torch.int32, max(words.numel(), words_of(count * width)), "words")
    values = words.new_empty(count)
    if count:
        launch(_unpack_lanes, (num_blocks(count), 1), words, values, count, width)
    return values


def _check_width(width: int) -> None:
    if not 1 <= width <= 31:
        raise KernelError(f"lanes are {width} bits wide; give 1 to 31")


@triton.jit(do_not_specialize=["count", "width", "num_bits"])
def _set_high_bits(positions, words, count, width, num_bits):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bit = (tl.load(positions + at, mask=at < count, other=0) >> width) + at
    inside = (at < count) & (bit >= 0) & (bit < num_bits)
    tl.atomic_or(words + (bit >> 5), 1 << (bit & 31), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["num_low_words", "num_words", "stride", "n", "k", "width"])
def _decode(rows, ends, positions, damaged, num_low_words, num_words, stride, n, k, width):
    """The i-th one, at bit b, gives position i the high part b - i; `damaged` is set if one is wrong, or if not k.

    Two positions share their high part where their ones are neighbours, and then the low parts must rise.
    """
    row = tl.program_id(1).to(tl.int64)
    lows = rows + row * stride
    words = lows + num_low_words
    ends += row * tl.num_programs(0)
    positions += row * k
    word, at, rank, most = words_and_ranks(words, ends, num_words)
    before = tl.load(words + at - 1, mask=(at > 0) & (at < num_words), other=0).to(tl.uint32, bitcast=True)
    follows = word & ((word << 1) | (before >> 31))
    for _ in range(most):
        place = lowest_one(word)
        inside = (word != 0) & (rank < k)
        in_lanes = inside & (width > 0)
        low = lane_at(lows, rank.to(tl.int64), width, in_lanes)
        same_high = inside & (((follows >> place.to(tl.uint32)) & 1) == 1)
        low_before = lane_at(lows, rank.to(tl.int64) - 1, width, in_lanes & same_high)
        position = ((at * 32 + place - rank).to(tl.int64) << width) | low
        wrong = inside & ((position >= n) | (same_high & (low <= low_before)))
        tl.store(damaged + rank * 0, 1, mask=wrong)
        tl.store(positions + rank, position.to(tl.int32), mask=inside)
        rank += 1
        word &= word - 1
    last = tl.program_id(0) == tl.num_programs(0) - 1
    tl.store(damaged, 1, mask=last & (tl.load(ends + tl.program_id(0)) != k))


def encode_elias_fano(positions: Tensor, width: int, num_high_bits: int) -> Tensor:
    """Low `width` bits of each ascending int32 position as lanes, then ones at (position >> width) + i."""
    count = positions.numel()
    check_vector(positions, torch.int32, count, "positions")
    num_low_words = words_of(count * width)
    words = torch.zeros(num_low_words + words_of(num_high_bits), dtype=torch.int32, device=positions.device)
    if count:
        high = words[num_low_words:]
        launch(_set_high_bits, (num_blocks(count), 1), positions, high, count, width, num_high_bits)
        pack_into(words[:num_low_words], positions, width)
    return words


def decode_elias_fano(words: Tensor, n: int, k: int, width: int) -> Tensor:
    """The positions again, int32; fewer or more than k if `words` are no code of k ascending positions under n.

    With rows, those of each, and none if one of them is no code.
    """
    rows = words.view(1, -1) if words.dim() == 1 else words
    num_low_words = words_of(k * width)
    num_words = rows.shape[1] - num_low_words
    check_rows(rows, torch.int32, num_low_words, "words")
    if k == 0 or num_words == 0:
        return unpack_bits(words[num_low_words:]) if words.dim() == 1 else words.new_empty(len(rows), 0)
    damaged = words.new_zeros(1)
    positions, ends = _read(rows, n, k, width, damaged)
    if not damaged.item():
        return positions.view(*words.shape[:-1], k)
    if words.dim() == 2:
        return words.new_empty(len(rows), 0)
    return words.new_empty(0) if int(ends[0, -1]) == k else unpack_bits(words[num_low_words:])


def read_elias_fano(words: Tensor, n: int, k: int, width: int, damaged: Tensor) -> Tensor:
    check_rows(words, torch.int32, words_of(k * width) + 1, "words")
    check_vector(damaged, torch.int32, 1, "damaged")
    return _read(words, n, k, width, damaged)[0].clamp_(0, n - 1)


def _read(rows: Tensor, n: int, k: int, width: int, damaged: Tensor) -> tuple[Tensor, Tensor]:
    """What rows say, and how many ones each has up to the end of each block; `damaged` is set if one is no code."""
    num_low_words = words_of(k * width)
    num_words = rows.shape[1] - num_low_words
    ends = count_ones(rows[:, num_low_words:])
    positions = rows.new_empty(len(rows), k)
    grid = (num_blocks(num_words), len(rows))
    launch(_decode, grid, rows, ends, positions, damaged, num_low_words, num_words, rows.stride(0), n, k, width)
    return positions, ends
