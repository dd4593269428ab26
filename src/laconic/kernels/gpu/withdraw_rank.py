"""The k-th largest by its digits, the places of what is taken, and the next guess; parts of the withdrawal kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.grid import BINS, NUM_BINS, meet
from laconic.kernels.gpu.withdraw_candidates import fetch_candidates, tally_candidates
from laconic.kernels.gpu.withdraw_fallback import tally_entries
from laconic.kernels.search import (
    BOLDEST,
    CALLS,
    GUESS,
    KTH,
    LOG_AIM,
    MARGIN,
    MEAN,
    PACE,
    PASSES,
    SHYEST,
    SMALLEST_CHANGE,
)

_GUESS, _KTH, _MEAN = tl.constexpr(GUESS), tl.constexpr(KTH), tl.constexpr(MEAN)
_MARGIN, _PASSES, _CALLS = tl.constexpr(MARGIN), tl.constexpr(PASSES), tl.constexpr(CALLS)
_SHYEST, _BOLDEST = tl.constexpr(SHYEST), tl.constexpr(BOLDEST)
_SMALLEST_CHANGE, _LOG_AIM, _PACE = tl.constexpr(SMALLEST_CHANGE), tl.constexpr(LOG_AIM), tl.constexpr(PACE)

FALLBACK_PASSES = tl.constexpr(6)  # four digits, a count, the taking


@triton.jit
def sums_of(counts, WIDTH: tl.constexpr):
    """The sum of one number per program: over the programs before this one, and over all."""
    each = tl.arange(0, WIDTH)
    count = tl.load(counts + each, mask=each < tl.num_programs(0), other=0, cache_modifier=".cg")
    return tl.sum(tl.where(each < tl.program_id(0), count, 0), 0), tl.sum(count, 0)


@triton.jit
def find_kth(memory, balance, places, kept_bits, begin, end, first, last, k, all_entries, awaited):
    """The bits of the k-th largest |x|, how many equal to it belong to the k, and the arrivals awaited so far.

    Four digits of 8 bits, the highest first: each program tallies its share of the candidates [first, last), or of all
    entries [begin, end), and all read the sum.
    """
    bins = tl.arange(0, NUM_BINS)
    prefix = 0
    wanted = k
    for digit in range(4):
        shift = 24 - 8 * digit
        if all_entries:
            mine = tally_entries(balance, begin, end, shift, prefix)
        elif digit == 0:
            mine = fetch_candidates(balance, places, kept_bits, first, last)
        else:
            mine = tally_candidates(kept_bits, first, last, shift, prefix)
        row = memory + BINS + digit * NUM_BINS + bins
        tl.atomic_add(row, mine, mask=mine > 0, sem="relaxed")
        awaited = meet(memory, awaited)
        tally = tl.load(row, cache_modifier=".cg")
        reached = tl.sum(tally, 0) - tl.cumsum(tally, 0) + tally  # in this bin or a higher one
        chosen = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(bins > chosen, tally, 0), 0)
        prefix = (prefix << 8) + chosen
    return prefix, wanted, awaited


@triton.jit
def advance(search, sums, n, k, kth, caught, all_entries, WIDTH: tl.constexpr):
    """Note what a step found and guess the next threshold: guess = kth * (1 - margin) * min(1, kth / last kth).

    The margin is a secant in the logarithm of the count: if `guess` caught c*k entries, a threshold lower than the k-th
    value by the share (1 - guess/kth) * ln(aim)/ln(c) would have caught aim*k. So it follows how steep the tail is,
    and error feedback makes it steep: what waits stands in a crowd just under the last threshold. Only the
    speed of the next step depends on all this.
    """
    at = tl.arange(0, WIDTH)
    total = tl.sum(tl.load(sums + at, mask=at < tl.num_programs(0), other=0.0, cache_modifier=".cg"), 0)
    mean = total / n.to(tl.float64)
    guess, last_kth, margin = tl.load(search + _GUESS), tl.load(search + _KTH), tl.load(search + _MARGIN)
    kth_value = tl.minimum(kth, 0x7F800000).to(tl.float32, bitcast=True).to(tl.float64)  # NaN counts as Inf
    log_reach = tl.log(tl.maximum(caught, 1).to(tl.float32) / k.to(tl.float32)).to(tl.float64)
    shortfall = 1 - guess / kth_value
    wanted = tl.where(shortfall * log_reach > 0, shortfall * _LOG_AIM / log_reach, _PACE * margin)
    wanted = tl.minimum(tl.maximum(wanted, margin / _PACE), margin * _PACE)
    wanted = tl.minimum(tl.maximum(wanted, _BOLDEST), _SHYEST)
    margin = tl.where((guess > 0) & (kth_value > 0), wanted, margin)
    change = tl.where(last_kth > 0, tl.minimum(tl.maximum(kth_value / last_kth, _SMALLEST_CHANGE), 1.0), 1.0)
    guess = kth_value * (1 - margin) * change
    tl.store(search + _GUESS, tl.where(guess < float("inf"), guess, 0.0))
    tl.store(search + _KTH, kth_value)
    tl.store(search + _MEAN, mean)
    tl.store(search + _MARGIN, margin)
    tl.store(search + _PASSES, tl.load(search + _PASSES) + 1 + tl.where(all_entries, FALLBACK_PASSES, 0))
    tl.store(search + _CALLS, tl.load(search + _CALLS) + 1)
