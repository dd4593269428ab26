"""The withdrawal: balance += factor*addend, and the exactly k largest out of it, in one launch.

One pass adds, sums |x|, and moves each entry that reaches the guessed threshold to its program's list, with a tally of
their magnitudes in bins. So the bin of the k-th largest is known; the few in it are shown to all, and each program
finds the k-th largest among them, writes its own chosen to their ranks, and puts the others back. Only if the guess
caught fewer than k, or more than there is room for, are all the entries searched instead. Between these stages the
programs meet; nothing waits for the host. (A launch for each stage takes as long for 100 M entries, and twice as long
for 20 M.)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.checks import check_vector
from laconic.kernels.gpu.grid import BINS, HEAD, REGISTERS, WARPS, leave, meet, memory_of, num_resident
from laconic.kernels.gpu.withdraw_adding import GROUP, TILE, WORDS, add_entries
from laconic.kernels.gpu.withdraw_bins import NUM_BINS, NUM_COPIES, find_bin, guessed
from laconic.kernels.gpu.withdraw_candidates import (
    TURNS,
    first_slots,
    list_open,
    restore,
    settle,
    take_candidates,
)
from laconic.kernels.gpu.withdraw_fallback import count_entries, find_kth, take_entries
from laconic.kernels.gpu.withdraw_rank import advance, sum_and_max_of, sum_before
from laconic.kernels.search import CALLS

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
    total, found = add_entries(balance, addend, words, places, kept, bins, run, n, room, factor, least, shift)
    tl.store(sums + me, total)
    tl.store(founds + me, found)
    awaited = meet(memory, 0)

    caught, most = sum_and_max_of(founds, WIDTH)
    kth_bin, lowest, num_bits, wanted, num_open = find_bin(memory + BINS, k, least, shift)
    all_entries = (caught < k) | (most > room) | (num_open > open_room)
    if all_entries:
        restore(balance, places, kept, tl.minimum(found, room))
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
        above = list_open(memory, opens, places, kept, found, run, least, shift, kth_bin)
        tl.store(aboves + tl.arange(0, TURNS) * programs + me, above)
        meet(memory, awaited)
        kth, last = settle(opens, num_open, lowest, num_bits, wanted)
        tl.store(slots + tl.arange(0, TURNS), first_slots(aboves, opens, num_open, kth, last, run, WIDTH))
        tl.debug_barrier()
        take_candidates(balance, positions, values, places, kept, slots, found, kth, last, run)
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
