"""Rice's code of the gaps between positions, with a width for every 64 of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laconic.kernels.reference.bits import pack_lanes, set_bits, unpack_bits, unpack_lanes, words_of
from laconic.kernels.registry import kernel

_BLOCK = 64  # gaps that share a width
_WIDTH_BITS = 5


@kernel
def encode_rice(positions: Tensor) -> Tensor:
    """int32 words for strictly ascending int32 positions, of which there is at least one.

    Of each gap the low b bits go as they are and the rest as a run of zeros before a one (Rice, JPL 79-22, 1979),
    where b = floor(log2(mean)) of its block. Words: all b in 5 bits each; low bits, those of narrow blocks first; runs.
    """
    k = positions.numel()
    gaps = _in_blocks(torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1)
    widths = _widths_of(gaps, k)
    high = (gaps >> widths.unsqueeze(1)).view(-1)[:k]
    ends = (high + 1).cumsum(0, dtype=torch.int32) - 1
    words = [pack_lanes(widths, _WIDTH_BITS)]
    for width, rows, count in _by_width(widths, k):
        words.append(pack_lanes(gaps[rows].view(-1)[:count] & ((1 << width) - 1), width))
    return torch.cat([*words, set_bits(ends, int(ends[-1]) + 1)])


@kernel
def decode_rice(words: Tensor, n: int, k: int) -> Tensor:
    """The positions again, int32; none if `words` are no code of k positions under n, k being one or more."""
    num_blocks = -(-k // _BLOCK)
    at = words_of(num_blocks * _WIDTH_BITS)
    if words.numel() < at:
        return words.new_empty(0)
    widths = unpack_lanes(words[:at], num_blocks, _WIDTH_BITS)
    low = words.new_zeros(num_blocks, _BLOCK)
    for width, rows, count in _by_width(widths, k):
        end = at + words_of(count * width)
        if words.numel() < end:
            return words.new_empty(0)
        low[rows] = _in_blocks(unpack_lanes(words[at:end], count, width))
        at = end
    ends = unpack_bits(words[at:])
    if ends.numel() != k:
        return words.new_empty(0)
    runs = _in_blocks(torch.diff(ends, prepend=ends.new_full((1,), -1)) - 1).to(torch.int64)
    if int(runs.max()) > n:  # before they are shifted out of 64 bits
        return words.new_empty(0)
    positions = ((runs << widths.unsqueeze(1)) + low + 1).view(-1)[:k].cumsum(0) - 1
    return positions.to(torch.int32) if int(positions[-1]) < n else words.new_empty(0)


def _in_blocks(values: Tensor) -> Tensor:
    """In rows of a block each, the last filled up with zeros."""
    missing = -values.numel() % _BLOCK
    return (torch.cat([values, values.new_zeros(missing)]) if missing else values).view(-1, _BLOCK)


def _widths_of(gaps: Tensor, k: int) -> Tensor:
    """floor(log2(mean)) of each block, int32: within 0.2 % of the best for the gradients it was tried on."""
    counts = torch.full((gaps.shape[0],), _BLOCK, device=gaps.device)
    counts[-1] -= -k % _BLOCK
    mean = gaps.sum(1) // counts
    return torch.frexp(mean.clamp_min(1).to(torch.float64)).exponent.to(torch.int32) - 1


def _by_width(widths: Tensor, k: int) -> Iterator[tuple[int, Tensor, int]]:
    """For each width above zero: the blocks that have it, and how many gaps those hold."""
    last = int(widths[-1])
    for width in torch.unique(widths).tolist():
        if width:
            rows = (widths == width).nonzero().view(-1)
            yield width, rows, rows.numel() * _BLOCK - (-k % _BLOCK if width == last else 0)
