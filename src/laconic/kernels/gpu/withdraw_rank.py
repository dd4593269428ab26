"""Sums over the programs, and the next guess; parts of the withdrawal kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.withdraw_fallback import PASSES as FALLBACK_PASSES
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

_GUESS = tl.constexpr(GUESS)
_KTH = tl.constexpr(KTH)
_MEAN = tl.constexpr(MEAN)
_MARGIN = tl.constexpr(MARGIN)
_PASSES = tl.constexpr(PASSES)
_CALLS = tl.constexpr(CALLS)
_SHYEST = tl.constexpr(SHYEST)
_BOLDEST = tl.constexpr(BOLDEST)
_SMALLEST_CHANGE = tl.constexpr(SMALLEST_CHANGE)
_LOG_AIM = tl.constexpr(LOG_AIM)
_PACE = tl.constexpr(PACE)


@triton.jit
def sum_before(counts, WIDTH: tl.constexpr):
    """The sum of one number per program, over the programs before this one."""
    each = tl.arange(0, WIDTH)
    return tl.sum(tl.load(counts + each, mask=each < tl.program_id(0), other=0, cache_modifier=".cg"), 0)


@triton.jit
def sum_and_max_of(counts, WIDTH: tl.constexpr):
    """The sum and the largest of one number per program."""
    each = tl.arange(0, WIDTH)
    count = tl.load(counts + each, mask=each < tl.num_programs(0), other=0, cache_modifier=".cg")
    return tl.sum(count, 0), tl.max(count, 0)


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
    guess = tl.load(search + _GUESS)
    last_kth = tl.load(search + _KTH)
    margin = tl.load(search + _MARGIN)
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
