"""The same search over all entries, for a guess that caught too few or too many; parts of the withdrawal kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.grid import DIGITS, meet
from laconic.kernels.gpu.magnitude import magnitude_bits
from laconic.kernels.gpu.withdraw_adding import TILE

PASSES = tl.constexpr(6)  # four digits, a count, the taking
NUM_VALUES = tl.constexpr(256)  # of a digit of 8 bits; tallies of 2,048 values take twice as long


@triton.jit
def _tally_entries(balance, begin, end, shift, prefix):
    """How many entries of [begin, end) whose digits above are `prefix` have each value of the next 8 bits."""
    tally = tl.zeros([NUM_VALUES], tl.int32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        digits = magnitude_bits(tl.load(balance + place, mask=place < end, other=0.0)) >> shift
        tally += tl.histogram(digits & 255, NUM_VALUES, mask=(place < end) & (digits >> 8 == prefix))
    return tally


@triton.jit
def find_kth(memory, balance, begin, end, k, awaited):
    """The bits of the k-th largest |x|, how many equal to it belong to the k, and the arrivals awaited so far.

    Four digits of 8 bits, the highest first: each program tallies its entries [begin, end), and all read the sum.
    """
    value = tl.arange(0, NUM_VALUES)
    prefix = 0
    wanted = k
    for digit in range(4):
        mine = _tally_entries(balance, begin, end, 24 - 8 * digit, prefix)
        row = memory + DIGITS + digit * NUM_VALUES + value
        tl.atomic_add(row, mine, mask=mine > 0, sem="relaxed")
        awaited = meet(memory, awaited)
        tally = tl.load(row, cache_modifier=".cg")
        reached = tl.sum(tally, 0) - tl.cumsum(tally, 0) + tally  # of this value or a higher one
        chosen = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(value > chosen, tally, 0), 0)
        prefix = (prefix << 8) + chosen
    return prefix, wanted, awaited


@triton.jit
def _weigh(bits, kth, here):
    """1 << 32 for what is above `kth`, 1 for what equals it: both counts in one sum."""
    return tl.where(here, ((bits > kth).to(tl.int64) << 32) + (bits == kth).to(tl.int64), 0)


@triton.jit
def count_entries(balance, begin, end, kth):
    """How many entries of [begin, end) lie (above << 32) + (at) `kth`."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(balance + place, mask=place < end, other=0.0))
        total += _weigh(bits, kth, place < end)
    return tl.sum(total, 0)


@triton.jit
def take_entries(balance, positions, values, begin, end, before, kth, ties):
    """Take what is above `kth`, and the first `ties` at it, out of [begin, end); leave zeros behind.

    `before` counts (above << 32) + (at) in all that stands earlier, which tells each of the chosen its rank.
    """
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        here = place < end
        value = tl.load(balance + place, mask=here, other=0.0)
        bits = magnitude_bits(value)
        weight = _weigh(bits, kth, here)
        rank = before + tl.cumsum(weight, 0) - weight
        at_kth = rank & 0xFFFFFFFF
        chosen = here & ((bits > kth) | ((bits == kth) & (at_kth < ties)))
        slot = (rank >> 32) + tl.minimum(at_kth, ties)
        tl.store(positions + slot, place, mask=chosen)
        tl.store(values + slot, value, mask=chosen)
        tl.store(balance + place, tl.zeros_like(value), mask=chosen)
        before += tl.sum(weight, 0)
