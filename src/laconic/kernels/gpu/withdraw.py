"""The withdrawal: balance += factor*addend, and the exactly k largest out of it, in one launch.

One pass adds, sums |x| and keeps a bit for each entry that reaches the guessed threshold. The entries of those bits
are listed in order, the k-th value is found among them by tallies of its digits, and the chosen go where they belong.
Only if the guess caught fewer than k, or more than there is room for, are all the entries searched instead. Between
these stages the programs meet; nothing waits for the host. (A launch for each stage takes as long for 100 M entries,
and twice as long for 20 M.)
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
from laconic.kernels.gpu.grid import HEAD, REGISTERS, WARPS, leave, meet, memory_of, num_resident
from laconic.kernels.gpu.withdraw_adding import add_entries
from laconic.kernels.gpu.withdraw_candidates import (
    TILE,
    WORDS,
    count_candidates,
    list_candidates,
    magnitude_bits,
    take_candidates,
)
from laconic.kernels.gpu.withdraw_fallback import count_entries, take_entries
from laconic.kernels.gpu.withdraw_rank import advance, find_kth, sums_of
from laconic.kernels.search import CALLS, GUESS

_GUESS = tl.constexpr(GUESS)
# Room for candidates: a balance that grows leaves a guess that catches up to 5 k at 1 % and 12 k at 0.1 %, once it has
# been growing for ten steps; and a quarter of the entries is always too many.
_ROOM_PER_K, _ENTRIES_PER_ROOM = 4, 64
_LEAST_ROOM = 4096

_OPTIONS = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_cooperative_grid": True, "enable_fp_fusion": False}

_compiled: dict[tuple[object, ...], Any] = {}


@triton.jit
def _areas(memory, rows, room):
    """Where the programs keep what they share (sums, counts, founds, places, bits), and this one its masks."""
    programs, me = tl.num_programs(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    sums = (memory + HEAD).to(tl.pointer_type(tl.float64))
    counts = (memory + HEAD + 2 * programs).to(tl.pointer_type(tl.int64))
    founds = memory + HEAD + 4 * programs
    masks = founds + programs
    places = masks + programs * rows * WORDS
    return sums, counts, founds, masks + me * rows * WORDS, places, places + room


@triton.jit(do_not_specialize=["n", "k", "room"])
def _withdraw(balance, addend, search, memory, positions, values, n, k, room, factor, WIDTH: tl.constexpr):
    programs, me = tl.num_programs(0), tl.program_id(0)
    num_tiles = tl.cdiv(n, TILE)
    rows = tl.cdiv(num_tiles, programs)
    first_tile = tl.minimum(me * rows, num_tiles)
    end_tile = tl.minimum(first_tile + rows, num_tiles)
    begin, end = first_tile * TILE, tl.minimum(end_tile * TILE, n)
    sums, counts, founds, masks, places, kept_bits = _areas(memory, rows, room)
    least = magnitude_bits(tl.load(search + _GUESS).to(tl.float32))

    total, found = add_entries(balance, addend, masks, first_tile, end_tile, n, factor, least)
    tl.store(sums + me, total)
    tl.store(founds + me, found)
    awaited = meet(memory, 0)

    found_before, caught = sums_of(founds, WIDTH)
    all_entries = (caught < k) | (caught > room)
    if all_entries == 0:
        list_candidates(masks, places + found_before, begin, (end_tile - first_tile) * WORDS)
    awaited = meet(memory, awaited)

    share = tl.cdiv(caught, programs)  # of the candidates, wherever they stand: layers differ
    first, last = tl.minimum(me * share, caught), tl.minimum((me + 1) * share, caught)
    kth, ties, awaited = find_kth(memory, balance, places, kept_bits, begin, end, first, last, k, all_entries, awaited)
    if all_entries:
        count = count_entries(balance, begin, end, kth)
    else:
        count = count_candidates(kept_bits, first, last, kth)
    tl.store(counts + me, count)
    meet(memory, awaited)

    before, _ = sums_of(counts, WIDTH)
    if all_entries:
        take_entries(balance, positions, values, begin, end, before, kth, ties)
    else:
        take_candidates(balance, positions, values, places, kept_bits, first, last, before, kth, ties)
    if me == 0:
        advance(search, sums, n, k, kth, caught, all_entries, WIDTH)
    leave(memory)


def _launch(programs: int, arguments: tuple[Any, ...]) -> None:
    """Launch the kernel. What Triton would find out about its arguments at each call, a key of ours tells.

    That takes 30 to 40 us instead of 40 to 80: Triton compares every constant of a module with what was compiled in.
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
    room = min(n, _ROOM_PER_K * k + n // _ENTRIES_PER_ROOM + _LEAST_ROOM, k + n // 4)
    num_words = HEAD.value + programs * (5 + WORDS.value * -(-num_tiles // programs)) + 2 * room
    positions = torch.empty(k, dtype=torch.int32, device=balance.device)
    values = torch.empty(k, dtype=torch.float32, device=balance.device)
    memory = memory_of(balance.device, num_words)
    _launch(programs, (balance, addend, search, memory, positions, values, n, k, room, float(factor)))
    return positions, values
