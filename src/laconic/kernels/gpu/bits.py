"""Bit vectors in int32 words, little-endian, from bit 0 up."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.checks import check_vector

BLOCK = tl.constexpr(1024)
_SUM_BLOCK = tl.constexpr(4096)


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


@triton.jit(do_not_specialize=["num_words"])
def _count_ones(words, counts, num_words):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < num_words, other=0).to(tl.uint32, bitcast=True)
    tl.store(counts + tl.program_id(0), tl.sum(num_ones(word), 0))


@triton.jit(do_not_specialize=["num_words"])
def _list_ones(words, ends, positions, num_words):
    """Each round takes one bit from every word, so that empty words cost nothing of their own."""
    word, at, rank, most = words_and_ranks(words, ends, num_words)
    for _ in range(most):
        tl.store(positions + rank, at * 32 + lowest_one(word), mask=word != 0)
        rank += 1
        word &= word - 1


@triton.jit
def _check_sum(words, total, num_words):
    """Integers wrap, so that the order of the atomic additions does not matter."""
    at = tl.program_id(0) * _SUM_BLOCK + tl.arange(0, _SUM_BLOCK)
    weighted = tl.load(words + at, mask=at < num_words, other=0) * (2 * at + 1)
    tl.atomic_add(total, tl.sum(weighted.to(tl.int64), 0).to(tl.int32), sem="relaxed")


def num_blocks(count: int) -> int:
    """How many blocks of BLOCK hold that many."""
    return -(-count // int(BLOCK.value))


def words_of(num_bits: int) -> int:
    """How many words hold that many bits."""
    return -(-num_bits // 32)


def count_ones(words: Tensor) -> Tensor:
    """The number of ones up to the end of each block of words, int64."""
    counts = torch.empty(num_blocks(words.numel()), dtype=torch.int32, device=words.device)
    _count_ones[(counts.numel(),)](words, counts, words.numel())
    return counts.cumsum(0)


def set_bits(positions: Tensor, num_bits: int) -> Tensor:
    """A bit vector as words, with a one at each of the int32 `positions`, in any order and however often given."""
    count = positions.numel()
    check_vector(positions, torch.int32, count, "positions")
    words = torch.zeros(words_of(num_bits), dtype=torch.int32, device=positions.device)
    if count:
        _set_bits[(num_blocks(count),)](positions, words, count, num_bits)
    return words


def unpack_bits(words: Tensor) -> Tensor:
    """Positions of the ones, ascending, int32; waits for the device, to know how many."""
    num_words = words.numel()
    check_vector(words, torch.int32, num_words, "words")
    if num_words == 0:
        return words.new_empty(0)
    ends = count_ones(words)
    positions = words.new_empty(int(ends[-1]))
    _list_ones[(num_blocks(num_words),)](words, ends, positions, num_words)
    return positions


def check_sum(words: Tensor) -> Tensor:
    """The sum of (2i + 1) * word_i modulo 2^32, as a 0-d int32.

    The weights are odd, so any change of one word changes it, and unequal, so words that change places do too.
    """
    num_words = words.numel()
    check_vector(words, torch.int32, num_words, "words")
    total = torch.zeros((), dtype=torch.int32, device=words.device)
    if num_words:
        _check_sum[(-(-num_words // _SUM_BLOCK.value),)](words, total, num_words)
    return total
