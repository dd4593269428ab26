"""How many candidates have which magnitude: bins that are narrow where the k-th largest is expected."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.gpu.magnitude import magnitude_bits
from laconic.kernels.search import GUESS, MARGIN

_GUESS = tl.constexpr(GUESS)
_MARGIN = tl.constexpr(MARGIN)

# 2,048 bins of one width, in which the k-th largest is expected, from the 512th on; above, 512 bins each time the
# distance from the guess doubles, four times; the last one has no end. So one bin holds a few thousandths of those
# between the guess and the k-th largest, even if the guess was far too low.
NUM_BINS = tl.constexpr(4096)
_NUM_EVEN = tl.constexpr(2048)
_LOG_EXPECTED = tl.constexpr(9)
_LOG_OCTAVE = tl.constexpr(9)
_FLOAT_OF_NUM_EVEN = tl.constexpr((127 + 11) << 23)  # the bits of 2048.0
NUM_COPIES = tl.constexpr(4)  # of all bins, so that fewer programs add to the same one


@triton.jit
def guessed(search):
    """The bits of the guess (without one, more than any number has), and how many of them a narrow bin spans."""
    guess = tl.load(search + _GUESS).to(tl.float32)
    least = tl.where(guess > 0, magnitude_bits(guess), 0x7FFFFFFF)
    log_margin = (magnitude_bits(tl.load(search + _MARGIN).to(tl.float32)) >> 23) - 127
    return least, tl.maximum(23 + log_margin - _LOG_EXPECTED, 0)


@triton.jit
def bin_of(bits, least, shift):
    """The bin of a magnitude that reaches `least`."""
    steps = (bits - least) >> shift
    octaves = steps.to(tl.float32).to(tl.int32, bitcast=True) - _FLOAT_OF_NUM_EVEN
    return tl.where(steps < _NUM_EVEN, steps, tl.minimum(_NUM_EVEN + (octaves >> (23 - _LOG_OCTAVE)), NUM_BINS - 1))


@triton.jit
def find_bin(bins, k, least, shift):
    """Where the k-th largest is.

    Its bin, the least magnitude in there, how many bits tell the others in there apart, how many of them are among the
    k largest, and how many there are.
    """
    each = tl.arange(0, NUM_BINS)
    copies = tl.arange(0, NUM_COPIES)[:, None] * NUM_BINS + each[None, :]
    tally = tl.sum(tl.load(bins + copies, cache_modifier=".cg"), 0)
    reached = tl.sum(tally, 0) - tl.cumsum(tally, 0) + tally  # in this bin or a higher one
    found = tl.maximum(tl.sum((reached >= k).to(tl.int32), 0) - 1, 0)
    wanted = k - tl.sum(tl.where(each > found, tally, 0), 0)
    octaves = tl.maximum(found - _NUM_EVEN, 0) << (23 - _LOG_OCTAVE)
    steps = tl.where(found < _NUM_EVEN, found, (octaves + _FLOAT_OF_NUM_EVEN).to(tl.float32, bitcast=True).to(tl.int32))
    num_bits = tl.where(found < _NUM_EVEN, shift, shift + 2 + (octaves >> 23))
    num_bits = tl.where(found == NUM_BINS - 1, 31, num_bits)
    return found, least + (steps << shift), num_bits, wanted, tl.sum(tl.where(each == found, tally, 0), 0)
