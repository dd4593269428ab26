"""The definition of every kernel, in plain torch and numpy; CPU and CUDA tensors alike, no Python loop over entries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_WORD_BITS = 32
_WORD_MASK = (1 << _WORD_BITS) - 1
_SAMPLE_ENTRIES = 16_384


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as int32 bit patterns, which order like |x| with NaN above Inf; `x` is float32."""
    return x.view(torch.int32) & 0x7FFFFFFF


def all_finite(x: Tensor) -> bool:
    """Whether `x` holds neither Inf nor NaN. The largest |x| tells; a sum could overflow and accuse finite data."""
    if x.numel() == 0:
        return True
    low, high = torch.aminmax(x)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def top_k_positions(x: Tensor, k: int) -> Tensor:
    """Positions of the exactly k largest |x|, ascending, int64; of equal ones the first are taken.

    torch.topk leaves the order of ties open, so it only gives the k-th value; and it ranks only the candidates above a
    threshold that a sample suggests: 3 ms instead of 21 for the 1.2 M entries of a small net, on one thread.
    """
    bits = magnitude_bits(x)
    if k >= bits.numel():
        return torch.arange(bits.numel(), device=x.device)
    candidates = _nonzero(bits >= _likely_threshold(bits, k))
    if candidates.numel() < k:
        candidates = torch.arange(bits.numel(), device=x.device)
    ranked = bits[candidates]
    kth = torch.topk(ranked, k, sorted=False).values.min()
    chosen = ranked > kth
    ties = _nonzero(ranked == kth)
    chosen[ties[: k - int(chosen.sum())]] = True
    return candidates[chosen]


def _likely_threshold(bits: Tensor, k: int) -> Tensor:
    """A value that about 1.3*k entries reach, most likely; only the speed of the caller depends on it."""
    sample = bits[:: max(1, bits.numel() // _SAMPLE_ENTRIES)]
    expected = k * sample.numel() / bits.numel()
    rank = min(sample.numel(), round(expected + 4 * expected**0.5 + 4))  # four sigma of a binomial, and a few
    return torch.topk(sample, rank, sorted=False).values.min()


def set_bits(positions: Tensor, num_bits: int) -> Tensor:
    """A bit vector as little-endian int32 words, with a one at each of `positions` (each given once)."""
    words = torch.zeros(-(-num_bits // _WORD_BITS), dtype=torch.int64, device=positions.device)
    one = torch.ones((), dtype=torch.int64, device=positions.device)
    words.index_add_(0, positions >> 5, one << (positions & 31))
    return _to_int32(words)


def unpack_bits(words: Tensor) -> Tensor:
    """Positions of the ones in a vector of int32 words, ascending, int64."""
    hit = _nonzero(words)  # most words of a sparse bitmap are empty
    bit = torch.arange(_WORD_BITS, device=words.device, dtype=torch.int32)
    ones = _nonzero(((words[hit].unsqueeze(1) >> bit) & 1).view(-1))
    return (hit[ones >> 5] << 5) + (ones & 31)


def pack_lanes(values: Tensor, width: int) -> Tensor:
    """Non-negative int64 `values`, each under 2^width and width <= 31, end to end in int32 words."""
    count = values.numel()
    words = torch.zeros(-(-count * width // _WORD_BITS) + 1, dtype=torch.int64, device=values.device)
    start = torch.arange(count, device=values.device) * width
    shifted = values << (start & 31)  # at most 31 + 31 bits, so a lane touches two words
    words.index_add_(0, start >> 5, shifted & _WORD_MASK)
    words.index_add_(0, (start >> 5) + 1, shifted >> _WORD_BITS)
    return _to_int32(words[:-1])


def unpack_lanes(words: Tensor, count: int, width: int) -> Tensor:
    """The inverse of pack_lanes, as int64."""
    wide = torch.cat([words.to(torch.int64) & _WORD_MASK, words.new_zeros(1, dtype=torch.int64)])
    start = torch.arange(count, device=words.device) * width
    # The upper word is cut to 31 bits so that the pair fits a signed 64-bit integer; a lane never needs bit 63.
    pair = wide[start >> 5] | ((wide[(start >> 5) + 1] & (_WORD_MASK >> 1)) << _WORD_BITS)
    return (pair >> (start & 31)) & ((1 << width) - 1)


def check_sum(words: Tensor) -> Tensor:
    """The sum of (2i + 1) * word_i modulo 2^32, as a 0-d int32.

    The weights are odd, so any change of one word changes it, and unequal, so words that change places do too.
    """
    weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    return _to_int32((words * weights).sum())  # int64 wraps modulo 2^64, which keeps the low 32 bits right


def _nonzero(x: Tensor) -> Tensor:
    """Positions of the entries of a vector that are not zero, ascending, int64."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(x.numpy()))  # 0.7 ms for 1.2 M booleans; torch.nonzero takes 7
    return x.nonzero().squeeze(1)


def _to_int32(words: Tensor) -> Tensor:
    """The low 32 bits of each int64, as int32, without relying on how a cast treats overflow."""
    low = words & _WORD_MASK
    return torch.where(low > _WORD_MASK >> 1, low - (1 << _WORD_BITS), low).to(torch.int32)
