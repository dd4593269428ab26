"""Elias-Fano: the low bits of ascending positions as lanes, the high bits as ones at (position >> width) + i."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.checks import check_rows, check_vector
from laconic.kernels.gpu.bits import (
    BLOCK,
    count_ones,
    lowest_one,
    num_blocks,
    unpack_bits,
    words_and_ranks,
    words_of,
)
from laconic.kernels.gpu.lanes import lane_at, pack_into
from laconic.kernels.gpu.launch import launch


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
