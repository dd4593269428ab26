"""The exact k-th largest among the candidates, and their taking; parts of the withdrawal kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.grid import NUM_OPEN
from laconic.kernels.gpu.magnitude import magnitude_bits
from laconic.kernels.gpu.withdraw_adding import TILE
from laconic.kernels.gpu.withdraw_bins import bin_of

SPAN = tl.constexpr(1024)  # candidates handled at once; a program has 5,000 to 8,000 of them at 1 % of 100 M entries
TURNS = tl.constexpr(32)  # of a program, at most
_AT_HAND = tl.constexpr(1024)  # open candidates that a search keeps in registers; a few hundred are usual
_MOST = tl.constexpr(0x7FFFFFFF)  # a position


@triton.jit
def _load_candidates(places, kept, start, found):
    """Positions and values of candidates from `start` on, and which of them there are; asked for one round ahead."""
    at = start + tl.arange(0, SPAN)
    here = at < found
    return tl.load(places + at, mask=here, other=0), tl.load(kept + at, mask=here, other=0.0), here


@triton.jit
def list_open(memory, opens, places, kept, found, run, least, shift, kth_bin):
    """List the candidates in the bin of the k-th largest, for all to see; returns how many of each turn exceed it."""
    above = tl.zeros([TURNS], tl.int32)
    place, value, here = _load_candidates(places, kept, 0, found)
    for start in range(0, found, SPAN):
        next_place, next_value, next_here = _load_candidates(places, kept, start + SPAN, found)
        bits = magnitude_bits(value)
        own = bin_of(bits, least, shift)
        above += tl.histogram(_run_of(place, run) // tl.num_programs(0), TURNS, mask=here & (own > kth_bin))
        is_open = (here & (own == kth_bin)).to(tl.int32)
        num_open = tl.sum(is_open, 0)
        if num_open > 0:  # which is so in one of three, as there are a few hundred in all
            slot = tl.atomic_add(memory + NUM_OPEN, num_open, sem="relaxed") + tl.cumsum(is_open, 0) - 1
            tl.store(opens + slot, (bits.to(tl.int64) << 32) + place, mask=is_open != 0)
        place = next_place
        value = next_value
        here = next_here
    return above


@triton.jit
def _run_of(place, run):
    """Which run of tiles a position is in; run r is a turn of program r % programs, its turn number r // programs."""
    return place // TILE // run


@triton.jit
def _load_open(opens, at, num_open):
    """Positions and magnitudes of open candidates; -1 where there are none."""
    pair = tl.load(opens + at, mask=at < num_open, other=-1, cache_modifier=".cg")  # other programs wrote it
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def _key(place, bits, kth):
    """What open candidates are ordered by: their bits, or among those equal to `kth` their places from the last on."""
    return bits if kth is None else tl.where(bits == kth, _MOST - place, -1)


@triton.jit
def _in_fields(key, one, two, three):
    """How many keys reach each of three numbers, in 21 bits each."""
    reached = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 21) + ((key >= three).to(tl.int64) << 42)
    return tl.sum(reached, 0)


@triton.jit
def _num_reaching(opens, num_open, key, kth, one, two, three):
    """How many keys of open candidates reach each of three numbers. The first are at hand, others are read again."""
    counts = _in_fields(key, one, two, three)
    for start in range(_AT_HAND, num_open, _AT_HAND):
        place, bits = _load_open(opens, start + tl.arange(0, _AT_HAND), num_open)
        counts += _in_fields(_key(place, bits, kth), one, two, three)
    return counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42


@triton.jit
def _reached_by(opens, num_open, key, kth, lowest, num_bits, wanted):
    """The largest of the numbers lowest ... lowest + 2^num_bits - 1 that `wanted` keys reach, two bits at a time."""
    for step in range(0, num_bits, 2):
        unit = 1 << tl.maximum(num_bits - 2 - step, 0)
        one, two, three = lowest + unit, lowest + 2 * unit, lowest + 3 * unit  # one past the last number is negative
        num_one, num_two, num_three = _num_reaching(opens, num_open, key, kth, one, two, three)
        raised = tl.where((one > lowest) & (num_one >= wanted), one, lowest)
        raised = tl.where((two > lowest) & (num_two >= wanted), two, raised)
        lowest = tl.where((three > lowest) & (num_three >= wanted), three, raised)
    return lowest


@triton.jit
def settle(opens, num_open, lowest, num_bits, wanted):
    """The bits of the `wanted`-th largest open candidate, and the last position at which one equal to it is taken."""
    place, bits = _load_open(opens, tl.arange(0, _AT_HAND), num_open)
    kth = _reached_by(opens, num_open, bits, None, lowest, num_bits, wanted)
    num_at_least, num_above, _ = _num_reaching(opens, num_open, bits, None, kth, kth + 1, kth + 1)
    last = _MOST
    if num_at_least > wanted:
        key = _key(place, bits, kth)
        last -= _reached_by(opens, num_open, key, kth, tl.zeros_like(kth), 31, wanted - num_above)
    return kth, last


@triton.jit
def _is_chosen(bits, place, kth, last):
    return (bits > kth) | ((bits == kth) & (place <= last))


@triton.jit
def first_slots(aboves, opens, num_open, kth, last, run, WIDTH: tl.constexpr):
    """For each turn of this program: how many are chosen before it, less those that the program itself chose before."""
    programs = tl.num_programs(0)
    me = tl.program_id(0)
    program = tl.arange(0, WIDTH)[None, :]
    at = aboves + tl.arange(0, TURNS)[:, None] * programs + program
    above = tl.load(at, mask=program < programs, other=0, cache_modifier=".cg")
    by_all = tl.sum(above, 1)
    earlier = tl.sum(tl.where(program < me, above, 0), 1)
    by_me = tl.sum(tl.where(program == me, above, 0), 1)
    for start in range(0, num_open, SPAN):
        place, bits = _load_open(opens, start + tl.arange(0, SPAN), num_open)
        chosen = _is_chosen(bits, place, kth, last)
        turn = _run_of(place, run) // programs
        who = _run_of(place, run) - turn * programs
        by_all += tl.histogram(turn, TURNS, mask=chosen)
        earlier += tl.histogram(turn, TURNS, mask=chosen & (who < me))
        by_me += tl.histogram(turn, TURNS, mask=chosen & (who == me))
    return tl.cumsum(by_all, 0) - by_all + earlier - tl.cumsum(by_me, 0) + by_me


@triton.jit
def take_candidates(balance, positions, values, places, kept, slots, found, kth, last, run):
    """Write the chosen out and put the others back where they were."""
    taken = 0
    place, value, here = _load_candidates(places, kept, 0, found)
    for start in range(0, found, SPAN):
        next_place, next_value, next_here = _load_candidates(places, kept, start + SPAN, found)
        chosen = here & _is_chosen(magnitude_bits(value), place, kth, last)
        rank = tl.cumsum(chosen.to(tl.int32), 0)
        slot = tl.load(slots + _run_of(place, run) // tl.num_programs(0), mask=here, other=0) + taken + rank - 1
        tl.store(positions + slot, place, mask=chosen)
        tl.store(values + slot, value, mask=chosen)
        tl.store(balance + place, value, mask=here & (chosen == 0))
        taken += tl.max(rank, 0)
        place = next_place
        value = next_value
        here = next_here


@triton.jit
def restore(balance, places, kept, count):
    """Put all candidates back."""
    for start in range(0, count, SPAN):
        at = start + tl.arange(0, SPAN)
        place = tl.load(places + at, mask=at < count, other=0)
        tl.store(balance + place, tl.load(kept + at, mask=at < count), mask=at < count)
