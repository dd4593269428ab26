"""Integers on a shared grid: the definition, in plain torch; no Python loop over entries, only over lanes.

Everything is exact float32 and integer arithmetic, in the order written here and never contracted into a fused
multiply-add, so that every backend gives the same bits. A *group* is a run of entries that share a scale: entry i
belongs to group i // group. Draws need no state: they are a hash of the worker, the step and the place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.contract import Key, kernel

_INFINITY_BITS = 0x7F800000
_DRAW_BITS = 24  # what a float32 in [0, 1) holds exactly


def draw_bits(count: int, key: Key, device: torch.device) -> Tensor:
    """`count` uniform 24-bit integers, as int32: a 32-bit mix of the position i, with the key let in twice.

    x = i ^ k0; x ^= x >> 16; x *= 0x7feb352d; x ^= k1; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16; x >> 8, unsigned
    and modulo 2^32 (the constants of lowbias32, C. Wellons 2018).
    """
    x = torch.arange(count, dtype=torch.int32, device=device)
    x ^= key[0]
    x ^= (x >> 16) & 0xFFFF  # torch shifts the sign in
    x *= 0x7FEB352D
    x ^= key[1]
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return (x >> 8) & 0xFFFFFF


@kernel
def largest_magnitudes(x: Tensor, group: int) -> Tensor:
    """max |x| of each group of a float32 vector, as float32; a NaN counts as Inf, so that MAX carries it anywhere."""
    bits = (x.view(torch.int32) & 0x7FFFFFFF).clamp_(max=_INFINITY_BITS)
    whole = x.numel() // group * group
    maxima = [bits[:whole].view(-1, group).amax(1)] if whole else []
    if whole < x.numel():
        maxima.append(bits[whole:].amax().view(1))
    return torch.cat(maxima).view(torch.float32) if maxima else x.new_zeros(0)


@kernel
def quantize_pack(
    x: Tensor, inverse: Tensor, group: int, levels: int, lane_bits: int, num_words: int, dtype: torch.dtype, key: Key
) -> Tensor:
    """Round finite float32 entries onto their grid without bias and pack the codes; `num_words` words of `dtype`.

    y = |x| * inverse[group of x]; q = min(floor(y) + [draw * 2^-24 < y - floor(y)], levels), with the sign of x.
    Word j holds sum over lanes l of q[l * num_words + j] * 2^(lane_bits * l), where entries past the end are 0.
    """
    y = x.abs() * _per_entry(inverse, group, x.numel())
    low = y.floor()
    draw = draw_bits(x.numel(), key, x.device).to(torch.float32) * 2.0**-_DRAW_BITS  # exact
    rounded = (low + (draw < y - low)).clamp_(max=levels)  # y may be an ulp over the number of levels
    return _pack(rounded.copysign_(x).to(torch.int64), lane_bits, num_words, dtype)


@kernel
def unpack_scale(words: Tensor, count: int, lane_bits: int, step: Tensor, group: int) -> Tensor:
    """float32(code) * step[its group] for the `count` codes in `words`, as float32."""
    return _unpack(words, lane_bits)[:count].to(torch.float32).mul_(_per_entry(step, group, count))


@kernel
def average_words(words: Tensor, lane_bits: int, key: Key) -> Tensor:
    """The mean of M rows of packed codes, rounded without bias to whole codes and packed the same way.

    q = floor((t + floor(draw * M * 2^-24)) / M), t the sum over rows; the draw of lane l, word j is number l*W + j.
    """
    num_rows, num_words = words.shape
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for row in words:
        total = total + _unpack(row, lane_bits)
    lift = (draw_bits(total.numel(), key, words.device).to(torch.int64) * num_rows) >> _DRAW_BITS
    return _pack(torch.div(total + lift, num_rows, rounding_mode="floor"), lane_bits, num_words, words.dtype)


def _per_entry(scale: Tensor, group: int, count: int) -> Tensor:
    """The scale of each entry, or one for all where that is enough."""
    if scale.numel() <= 1 or group == 1:
        return scale
    return scale.repeat_interleave(group)[:count]


def _pack(codes: Tensor, lane_bits: int, num_words: int, dtype: torch.dtype) -> Tensor:
    """Signed int64 codes as the digits of words, lane l of word j being code l * num_words + j.

    Digits are signed, not biased: with |digit| < 2^(lane_bits - 1) also the sum over workers stays inside a signed
    word, so nothing overflows on the way, and zeros are zero words.
    """
    words = torch.zeros(num_words, dtype=torch.int64, device=codes.device)
    for lane in range(-(-codes.numel() // num_words) if num_words else 0):
        digits = codes[lane * num_words : (lane + 1) * num_words]
        words[: digits.numel()].add_(digits, alpha=1 << lane * lane_bits)
    return words.to(dtype)


def _unpack(words: Tensor, lane_bits: int) -> Tensor:
    """The digits of words, lane by lane, as int64.

    All lower lanes together are less than half a unit of lane l, so a shift that rounds to nearest (floor, plus the
    highest bit shifted out) takes them away, and the low lane_bits of it, with their sign, are the digit.
    """
    lanes = words.dtype.itemsize * 8 // lane_bits
    wide = words.to(torch.int64)
    half = 1 << (lane_bits - 1)
    digits = torch.empty(lanes, words.numel(), dtype=torch.int64, device=words.device)
    for lane in range(lanes):
        shift = lane * lane_bits
        shifted = (wide >> shift) + ((wide >> (shift - 1)) & 1 if lane else 0)
        digits[lane] = ((shifted + half) & (2 * half - 1)) - half
    return digits.view(-1)
