"""The pass that adds, and takes out what reaches the guess; part of the withdrawal kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.bits import lowest_one, num_ones
from laconic.kernels.gpu.magnitude import magnitude_bits
from laconic.kernels.gpu.withdraw_bins import bin_of

TILE = tl.constexpr(4096)  # entries that a program reads at once; 16 a thread, so 128 bytes of loads in flight
WORDS = tl.constexpr(TILE.value // 32)
GROUP = tl.constexpr(2)  # tiles whose hits are moved together, from the cache: a word of 32 entries to each thread


@triton.jit
def _tile_of(row, run):
    """The tile that is this program's number `row`: programs take turns of `run` tiles."""
    return (row // run * tl.num_programs(0) + tl.program_id(0)) * run + row % run


@triton.jit
def _load_tile(x, tile, n, MASKED: tl.constexpr):
    """Rows of 32 entries. Only the last tile is masked: a mask that no compiler sees through undoes 16-byte loads."""
    within = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    start = tile.to(tl.int64) * TILE
    if MASKED:
        return tl.load(x + start + within, mask=within < n - start, other=0.0)
    return tl.load(x + start + within)


@triton.jit
def _load_both(balance, addend, tile, n, MASKED: tl.constexpr):
    x = _load_tile(balance, tile, n, MASKED)
    return x, _load_tile(addend, tile, n, MASKED) if addend is not None else x


@triton.jit
def _add_tile(balance, addend, words, x, y, tile, n, factor, least, MASKED: tl.constexpr):
    """Add a loaded tile and keep a bit for each hit; returns |x| summed four by four, within a thread."""
    lane = tl.arange(0, 32)[None, :]
    within = tl.arange(0, WORDS)[:, None] * 32 + lane
    start = tile.to(tl.int64) * TILE
    inside = (within < n - start) if MASKED else None
    if addend is not None:
        x += factor * y
        tl.store(balance + start + within, x, mask=inside)
    hit = magnitude_bits(x) >= least
    if MASKED:
        hit &= inside
    tl.store(words + tl.arange(0, WORDS), tl.sum(hit.to(tl.int32) << lane, 1))
    return tl.sum(tl.reshape(tl.abs(x), [WORDS, 8, 4]), 2)


@triton.jit
def _move_hits(balance, words, places, kept, bins, first_row, num_rows, found, room, run, least, shift):
    """Move the hits of some tiles to the list, in the order of positions, while there is room; returns their number.

    Each round takes one bit from every word, so that 36 % of words with a hit (1.4 % of entries) cost a few rounds and
    empty words nothing of their own.
    """
    tl.debug_barrier()
    at = tl.arange(0, GROUP * WORDS)
    word = tl.load(words + at, mask=at < num_rows * WORDS, other=0).to(tl.uint32, bitcast=True)
    ones = num_ones(word)
    slot = found + tl.cumsum(ones, 0) - ones
    position = _tile_of(first_row + at // WORDS, run) * TILE + at % WORDS * 32
    for _ in range(tl.max(ones, 0)):
        listed = (word != 0) & (slot < room)
        place = position + lowest_one(word)
        value = tl.load(balance + place, mask=listed, other=0.0)
        tl.store(places + slot, place, mask=listed)
        tl.store(kept + slot, value, mask=listed)
        tl.store(balance + place, tl.zeros_like(value), mask=listed)
        tl.atomic_add(bins + bin_of(magnitude_bits(value), least, shift), 1, mask=listed, sem="relaxed")
        slot += 1
        word &= word - 1
    tl.debug_barrier()
    return tl.sum(ones, 0)


@triton.jit
def add_entries(balance, addend, words, places, kept, bins, run, n, room, factor, least, shift):
    """Add this program's tiles; returns the sum of |x| in them and how many of them reach `least`.

    What reaches it leaves the balance for the program's list, and is counted in bins. Turns of few tiles spread the
    hits of one layer, which may have them all, over many programs. The next tile is loaded ahead, so that memory has
    work while hits are moved.
    """
    programs = tl.num_programs(0)
    me = tl.program_id(0)
    num_whole = n // TILE
    num_turns = num_whole // (run * programs)
    rest = num_whole - num_turns * run * programs - me * run
    num_rows = num_turns * run + tl.minimum(tl.maximum(rest, 0), run)
    sums = tl.zeros([WORDS, 8], tl.float32)
    found = 0
    if num_rows > 0:
        x, y = _load_both(balance, addend, _tile_of(0, run), n, MASKED=False)
        for first_row in range(0, num_rows, GROUP):
            num_here = tl.minimum(num_rows - first_row, GROUP)
            for row in range(num_here):
                ahead = _tile_of(tl.minimum(first_row + row + 1, num_rows - 1), run)
                next_x, next_y = _load_both(balance, addend, ahead, n, MASKED=False)
                tile = _tile_of(first_row + row, run)
                sums += _add_tile(balance, addend, words + row * WORDS, x, y, tile, n, factor, least, MASKED=False)
                x = next_x
                y = next_y
            found += _move_hits(balance, words, places, kept, bins, first_row, num_here, found, room, run, least, shift)
    if (num_whole * TILE < n) & (num_whole // run % programs == me):  # the last tile of all, if it is not whole
        x, y = _load_both(balance, addend, num_whole, n, MASKED=True)
        sums += _add_tile(balance, addend, words, x, y, num_whole, n, factor, least, MASKED=True)
        found += _move_hits(balance, words, places, kept, bins, num_rows, 1, found, room, run, least, shift)
    return tl.sum(tl.sum(sums.to(tl.float64), 1), 0), found
