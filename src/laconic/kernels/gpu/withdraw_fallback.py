"""The same search over all entries, for a guess that caught too few or too many; parts of the withdrawal kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.grid import NUM_BINS
from laconic.kernels.gpu.withdraw_candidates import TILE, magnitude_bits, take, weigh


@triton.jit
def tally_entries(balance, begin, end, shift, prefix):
    """How many entries of [begin, end) whose digits above are `prefix` have each value of the next 8 bits."""
    tally = tl.zeros([NUM_BINS], tl.int32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        digits = magnitude_bits(tl.load(balance + place, mask=place < end, other=0.0)) >> shift
        tally += tl.histogram(digits & 255, NUM_BINS, mask=(place < end) & (digits >> 8 == prefix))
    return tally


@triton.jit
def count_entries(balance, begin, end, kth):
    """How many entries of [begin, end) lie (above << 32) + (at) `kth`."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(balance + place, mask=place < end, other=0.0))
        total += weigh(bits, kth, place < end)
    return tl.sum(total, 0)


@triton.jit
def take_entries(balance, positions, values, begin, end, before, kth, ties):
    """Take the chosen out of [begin, end)."""
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        value = tl.load(balance + place, mask=place < end, other=0.0)
        before = take(balance, positions, values, place, value, before, kth, ties, place < end)
