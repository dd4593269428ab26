"""The entries that reach the guess, in the order of their positions; parts of the withdrawal kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.bits import lowest_one, num_ones
from laconic.kernels.gpu.grid import NUM_BINS

TILE = tl.constexpr(4096)  # entries that a program reads at once; 16 a thread, so 128 bytes of loads in flight
WORDS = tl.constexpr(TILE.value // 32)
SPAN = tl.constexpr(1024)  # words or candidates handled at once


@triton.jit
def magnitude_bits(x):
    """|x| as int32 bit patterns, which order like |x| with NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def list_candidates(masks, places, first, num_words):
    """Positions of the ones in this program's mask words, ascending; the first word's bit 0 is position `first`.

    Each round takes one bit from every word, so that 27 % of words with a hit (1 % of entries) cost a few rounds and
    empty words nothing of their own.
    """
    found = 0
    for start in range(0, num_words, SPAN):
        at = start + tl.arange(0, SPAN)
        word = tl.load(masks + at, mask=at < num_words, other=0).to(tl.uint32, bitcast=True)
        ones = num_ones(word)
        slot = found + tl.cumsum(ones, 0) - ones
        position = first + at * 32
        for _ in range(tl.max(ones, 0)):
            tl.store(places + slot, position + lowest_one(word), mask=word != 0)
            slot += 1
            word &= word - 1
        found += tl.sum(ones, 0)


@triton.jit
def fetch_candidates(balance, places, kept_bits, first, last):
    """Keep the bits of each candidate's value beside its position, and tally the highest digit of its magnitude."""
    tally = tl.zeros([NUM_BINS], tl.int32)
    for start in range(first, last, SPAN):
        at = start + tl.arange(0, SPAN)
        here = at < last
        place = tl.load(places + at, mask=here, other=0, cache_modifier=".cg")  # other programs wrote both
        value = tl.load(balance + place, mask=here, other=0.0, cache_modifier=".cg")
        tl.store(kept_bits + at, value.to(tl.int32, bitcast=True), mask=here)
        tally += tl.histogram(magnitude_bits(value) >> 24, NUM_BINS, mask=here)
    return tally


@triton.jit
def tally_candidates(kept_bits, first, last, shift, prefix):
    """How many candidates whose digits above are `prefix` have each value of the 8 bits from `shift` on."""
    tally = tl.zeros([NUM_BINS], tl.int32)
    for start in range(first, last, SPAN):
        at = start + tl.arange(0, SPAN)
        digits = (tl.load(kept_bits + at, mask=at < last, other=0) & 0x7FFFFFFF) >> shift
        tally += tl.histogram(digits & 255, NUM_BINS, mask=(at < last) & (digits >> 8 == prefix))
    return tally


@triton.jit
def weigh(bits, kth, here):
    """1 << 32 for what is above `kth`, 1 for what equals it: both counts in one sum."""
    return tl.where(here, ((bits > kth).to(tl.int64) << 32) + (bits == kth).to(tl.int64), 0)


@triton.jit
def count_candidates(kept_bits, first, last, kth):
    """How many of this program's candidates lie (above << 32) + (at) `kth`."""
    total = tl.zeros([SPAN], tl.int64)
    for start in range(first, last, SPAN):
        at = start + tl.arange(0, SPAN)
        bits = tl.load(kept_bits + at, mask=at < last, other=0) & 0x7FFFFFFF
        total += weigh(bits, kth, at < last)
    return tl.sum(total, 0)


@triton.jit
def take(balance, positions, values, place, value, before, kth, ties, here):
    """Write what is above `kth`, and the first `ties` at it, to their ranks among the chosen; leave zeros behind.

    `before` counts (above << 32) + (at) in all that stands earlier; returns it for what comes next.
    """
    bits = magnitude_bits(value)
    weight = weigh(bits, kth, here)
    rank = before + tl.cumsum(weight, 0) - weight
    at_kth = rank & 0xFFFFFFFF
    chosen = here & ((bits > kth) | ((bits == kth) & (at_kth < ties)))
    slot = (rank >> 32) + tl.minimum(at_kth, ties)
    tl.store(positions + slot, place, mask=chosen)
    tl.store(values + slot, value, mask=chosen)
    tl.store(balance + place, tl.zeros_like(value), mask=chosen)
    return before + tl.sum(weight, 0)


@triton.jit
def take_candidates(balance, positions, values, places, kept_bits, first, last, before, kth, ties):
    """Take the chosen among this program's candidates."""
    for start in range(first, last, SPAN):
        at = start + tl.arange(0, SPAN)
        here = at < last
        place = tl.load(places + at, mask=here, other=0, cache_modifier=".cg")
        value = tl.load(kept_bits + at, mask=here, other=0).to(tl.float32, bitcast=True)
        before = take(balance, positions, values, place, value, before, kth, ties, here)
