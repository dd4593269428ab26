"""Sparse vectors: the largest entries taken out (parts of the search, and the withdrawal), and frames added up.

The withdrawal is balance += factor*addend, and the exactly k largest out of it, in one launch. One pass adds, sums |x|,
and moves each entry that reaches the guessed threshold to its program's list, with a tally of their magnitudes in bins.
So the bin of the k-th largest is known; the few in it are shown to all, and each program finds the k-th largest among
them, writes its own chosen to their ranks, and puts the others back. Only if the guess caught fewer than k, or more
than there is room for, are all the entries searched instead. Between these stages the programs meet; nothing waits for
the host. (A launch for each stage takes as long for 100 M entries, and twice as long for 20 M.)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels import reference
from laconic.kernels.contract import (
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
    check_vector,
)
from laconic.kernels.gpu.bits import set_bits, unpack_bits
from laconic.kernels.gpu.launch import (
    BINS,
    HEAD,
    REGISTERS,
    WARPS,
    launch,
    leave,
    magnitude_bits,
    meet,
    memory_of,
    num_resident,
)
from laconic.kernels.gpu.withdraw_stages import (
    GROUP,
    NUM_BINS,
    NUM_COPIES,
    TILE,
    TURNS,
    WORDS,
    add_entries,
    count_entries,
    find_bin,
    find_kth,
    first_slots,
    guessed,
    list_open,
    restore,
    settle,
    take_candidates,
    take_entries,
)
from laconic.kernels.gpu.withdraw_stages import PASSES as FALLBACK_PASSES


@triton.jit
def _flag_nonfinite(x, flag, n, least):
    """Set `flag` if the bits of some |x| reach `least`; programs that set it agree, so they need not take turns."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    largest = tl.max(magnitude_bits(tl.load(x + at, mask=at < n, other=0.0)), 0)
    tl.store(flag, 1, mask=largest >= least)


@triton.jit
def _zero_if(x, flag, n):
    if tl.load(flag) != 0:
        at = tl.program_id(0) * TILE + tl.arange(0, TILE)
        tl.store(x + at, tl.zeros([TILE], tl.float32), mask=at < n)


@triton.jit
def _sum_magnitudes(x, sums, n):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    magnitude = tl.abs(tl.load(x + at, mask=at < n, other=0.0))
    tl.store(sums + tl.program_id(0), tl.sum(magnitude.to(tl.float64), 0))


@triton.jit(do_not_specialize=["num_thresholds"])
def _count_at_least(x, thresholds, counts, n, num_thresholds):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    bits = tl.where(at < n, magnitude_bits(tl.load(x + at, mask=at < n, other=0.0)), -1)
    for i in range(num_thresholds):
        reached = tl.sum((bits >= magnitude_bits(tl.load(thresholds + i))).to(tl.int32), 0)
        tl.atomic_add(counts + i, reached.to(tl.int64), sem="relaxed")


@cache
def _bits(magnitude: float) -> int:
    """Of a float32; they order like numbers."""
    return int(torch.tensor(magnitude, dtype=torch.float32).view(torch.int32))


def all_finite(x: Tensor, below: float = math.inf) -> bool:
    """Return whether all |x| are below a bound, and none is NaN; waits for the device. Only float32 is checked here."""
    n = x.numel()
    if x.dtype != torch.float32 or n == 0:
        return reference.all_finite(x, below)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    flag_nonfinite_(flag, x, below)
    return not flag.item()


def flag_nonfinite_(flag: Tensor, x: Tensor, below: float = math.inf) -> None:
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    check_vector(flag, torch.int32, 1, "flag")
    launch(_flag_nonfinite, (*_tiles(n), 1), x, flag, n, _bits(below))


def zero_if_(x: Tensor, flag: Tensor) -> None:
    """Where nothing is to be done, no entry is touched."""
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    check_vector(flag, torch.int32, 1, "flag")
    launch(_zero_if, (*_tiles(n), 1), x, flag, n)


def mean_magnitude(x: Tensor) -> Tensor:
    """The mean of |x|, a 0-d float64; a float32 sum over 25 M entries would be off by 5 %."""
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    sums = torch.empty(_tiles(n)[0], dtype=torch.float64, device=x.device)
    if n:
        _sum_magnitudes[_tiles(n)](x, sums, n)
    return sums.sum() / n


def count_at_least(x: Tensor, thresholds: Tensor) -> Tensor:
    """The number of |x| that reach each of the float32 `thresholds`, int64."""
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    check_vector(thresholds, torch.float32, thresholds.numel(), "thresholds")
    counts = torch.zeros(thresholds.numel(), dtype=torch.int64, device=x.device)
    if n:
        _count_at_least[_tiles(n)](x, thresholds, counts, n, thresholds.numel())
    return counts


def _tiles(n: int) -> tuple[int]:
    return (-(-n // int(TILE.value)),)


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


# Room for candidates: a balance that grows leaves a guess that catches up to 5 k at 1 % and 12 k at 0.1 %; a quarter of
# all entries is always too many. Programs share it evenly, and each may have taken one run of tiles that are all hits.
_ROOM_PER_K = 6
_ENTRIES_PER_ROOM = 64
# In the bin of the k-th largest a thousandth of k is usual, a twentieth has been seen; counts of it have 21 bits.
_K_PER_OPEN_ROOM = 8
_LEAST_OPEN_ROOM = 65536
_MOST_OPEN_ROOM = 2**21 - 1

_OPTIONS = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_cooperative_grid": True, "enable_fp_fusion": False}

_compiled: dict[tuple[object, ...], Any] = {}


@triton.jit
def _areas(memory, room, open_room):
    """Where the programs keep what they share (sums, counts, opens, founds, aboves), and this one its own."""
    programs = tl.num_programs(0).to(tl.int64)
    me = tl.program_id(0).to(tl.int64)
    sums = (memory + HEAD).to(tl.pointer_type(tl.float64))
    counts = (memory + HEAD + 2 * programs).to(tl.pointer_type(tl.int64))
    opens = counts + programs
    founds = (opens + open_room).to(tl.pointer_type(tl.int32))
    aboves = founds + programs
    slots = aboves + TURNS * programs
    words = slots + TURNS * programs
    lists = words + GROUP * WORDS * programs
    places = lists + me * room
    kept = (lists + (programs + me) * room).to(tl.pointer_type(tl.float32))
    return sums, counts, opens, founds, aboves, slots + me * TURNS, words + me * GROUP * WORDS, places, kept


@triton.jit(do_not_specialize=["n", "k", "room", "open_room"])
def _withdraw(balance, addend, search, memory, positions, values, n, k, room, open_room, factor, WIDTH: tl.constexpr):
    programs = tl.num_programs(0)
    me = tl.program_id(0)
    num_tiles = tl.cdiv(n, TILE)
    run = tl.cdiv(num_tiles, programs * TURNS)
    sums, counts, opens, founds, aboves, slots, words, places, kept = _areas(memory, room, open_room)
    least, shift = guessed(search)

    bins = memory + BINS + me % NUM_COPIES * NUM_BINS
    total, num_hits = add_entries(balance, addend, words, places, kept, bins, run, n, room, factor, least, shift)
    tl.store(sums + me, total)
    tl.store(founds + me, num_hits)
    awaited = meet(memory, 0)

    caught, most = sum_and_max_of(founds, WIDTH)
    kth_bin, lowest, num_bits, wanted, num_open = find_bin(memory + BINS, k, least, shift)
    all_entries = (caught < k) | (most > room) | (num_open > open_room)
    if all_entries:
        restore(balance, places, kept, tl.minimum(num_hits, room))
        awaited = meet(memory, awaited)
        share = tl.cdiv(num_tiles, programs)
        first_tile = tl.minimum(me * share, num_tiles)
        begin = first_tile * TILE
        end = tl.minimum(tl.minimum(first_tile + share, num_tiles) * TILE, n)
        kth, ties, awaited = find_kth(memory, balance, begin, end, k, awaited)
        tl.store(counts + me, count_entries(balance, begin, end, kth))
        meet(memory, awaited)
        take_entries(balance, positions, values, begin, end, sum_before(counts, WIDTH), kth, ties)
    else:
        above = list_open(memory, opens, places, kept, num_hits, run, least, shift, kth_bin)
        tl.store(aboves + tl.arange(0, TURNS) * programs + me, above)
        meet(memory, awaited)
        kth, last = settle(opens, num_open, lowest, num_bits, wanted)
        tl.store(slots + tl.arange(0, TURNS), first_slots(aboves, opens, num_open, kth, last, run, WIDTH))
        tl.debug_barrier()
        take_candidates(balance, positions, values, places, kept, slots, num_hits, kth, last, run)
    if me == 0:
        advance(search, sums, n, k, kth, caught, all_entries, WIDTH)
    leave(memory)


def _launch(programs: int, arguments: tuple[Any, ...]) -> None:
    """Launch the kernel. What Triton would find out about its arguments at each call, a key of ours tells.

    That takes 20 us instead of 40 to 80: Triton compares every constant of a module with what was compiled in.
    """
    balance, addend = arguments[:2]
    width = triton.next_power_of_2(programs)
    aligned = (balance.data_ptr() % 16 == 0, addend is None or addend.data_ptr() % 16 == 0)
    key = (balance.device, width, addend is None, aligned)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*arguments, width)
        return
    made = _withdraw[(programs,)](*arguments, WIDTH=width, **_OPTIONS)
    if balance.is_cuda:
        _compiled[key] = made


def withdraw_(
    balance: Tensor, addend: Tensor | None, k: int, search: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    n = balance.numel()
    check_vector(balance, torch.float32, n, "balance")
    check_vector(search, torch.float64, CALLS + 1, "search")
    if addend is not None:
        check_vector(addend, torch.float32, n, "addend")
    if not 0 < k <= n:
        raise KernelError(f"withdraw_ of k = {k} from {n} entries; give 1 to {n}")
    num_tiles = -(-n // TILE.value)
    programs = min(num_tiles, num_resident(balance.device, n))
    run = -(-num_tiles // (programs * TURNS.value))
    room = min(_ROOM_PER_K * k + n // _ENTRIES_PER_ROOM, k + n // 4) // programs + run * TILE.value
    open_room = min(max(k // _K_PER_OPEN_ROOM, _LEAST_OPEN_ROOM), _MOST_OPEN_ROOM)
    own_words = 5 + 2 * TURNS.value + GROUP.value * WORDS.value + 2 * room
    num_words = HEAD.value + 2 * open_room + programs * own_words
    positions = torch.empty(k, dtype=torch.int32, device=balance.device)
    values = torch.empty(k, dtype=torch.float32, device=balance.device)
    memory = memory_of(balance.device, num_words)
    _launch(programs, (balance, addend, search, memory, positions, values, n, k, room, open_room, float(factor)))
    return positions, values


def sum_over_union_(
    total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor], *, take: bool
) -> tuple[Tensor, Tensor]:
    reference.add_at_(total, positions, values)
    places = unpack_bits(set_bits(torch.cat(list(positions)), total.numel()))
    sums = total.index_select(0, places)
    if take:
        total.index_fill_(0, places.to(torch.int64), 0)
    return places, sums
