"""The pass that adds and marks what reaches the guess; part of the withdrawal kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.bits import num_ones
from laconic.kernels.gpu.withdraw_candidates import TILE, WORDS, magnitude_bits


@triton.jit
def _add_tile(balance, addend, masks, tile, n, factor, least, MASKED: tl.constexpr):
    """Add one tile and keep the bits of its hits; returns |x| summed four by four, within a thread, and those bits.

    Only the last tile is masked: a mask that the compiler cannot see through would undo the 16-byte loads.
    """
    lane = tl.arange(0, 32)[None, :]
    within = tl.arange(0, WORDS)[:, None] * 32 + lane
    start = tile.to(tl.int64) * TILE
    inside = (within < n - start) if MASKED else None
    at = balance + start + within
    x = tl.load(at, mask=inside, other=0.0) if MASKED else tl.load(at)
    if addend is not None:
        y = addend + start + within
        x += factor * (tl.load(y, mask=inside, other=0.0) if MASKED else tl.load(y))
        tl.store(at, x, mask=inside)
    hit = magnitude_bits(x) >= least
    if MASKED:
        hit &= inside
    words = tl.sum(hit.to(tl.int32) << lane, 1)
    tl.store(masks + tl.arange(0, WORDS), words)
    return tl.sum(tl.reshape(tl.abs(x), [WORDS, 8, 4]), 2), words.to(tl.uint32, bitcast=True)


@triton.jit
def add_entries(balance, addend, masks, first_tile, end_tile, n, factor, least):
    """Add this program's tiles; returns the sum of |x| in them and how many of them reach `least`."""
    sums = tl.zeros([WORDS, 8], tl.float32)
    found = tl.zeros([WORDS], tl.int32)
    num_whole = tl.minimum(end_tile, n // TILE) - first_tile
    for row in range(num_whole):
        more, words = _add_tile(balance, addend, masks + row * WORDS, first_tile + row, n, factor, least, False)
        sums += more
        found += num_ones(words)
    if (first_tile < end_tile) & (end_tile > n // TILE):  # the last tile of all, if it is not whole
        masks += num_whole * WORDS
        more, words = _add_tile(balance, addend, masks, first_tile + num_whole, n, factor, least, True)
        sums += more
        found += num_ones(words)
    return tl.sum(tl.sum(sums.to(tl.float64), 1), 0), tl.sum(found, 0)
