"""Bit vectors, lanes of bits, and codes of ascending positions (Elias-Fano's and Rice's), in int32 words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laconic.kernels.contract import kernel, words_of
from laconic.kernels.host import nonzero

_WORD_BITS = 32
_WORD_MASK = (1 << _WORD_BITS) - 1


@kernel
def set_bits(positions: Tensor, num_bits: int) -> Tensor:
    """A bit vector as words, with a one at each of the int32 `positions`, in any order and however often given."""
    positions = positions.unique()  # type: ignore[no-untyped-call]
    words = torch.zeros(words_of(num_bits), dtype=torch.int64, device=positions.device)
    one = torch.ones((), dtype=torch.int64, device=positions.device)
    words.index_add_(0, positions >> 5, one << (positions & 31).to(torch.int64))
    return _to_int32(words)


@kernel
def unpack_bits(words: Tensor) -> Tensor:
    """Positions of the ones, ascending, int32."""
    hit = nonzero(words)  # most words of a sparse bitmap are empty
    bit = torch.arange(_WORD_BITS, device=words.device, dtype=torch.int32)
    ones = nonzero(((words[hit].unsqueeze(1) >> bit) & 1).view(-1))
    return ((hit[ones >> 5] << 5) + (ones & 31)).to(torch.int32)


@kernel
def pack_lanes(values: Tensor, width: int) -> Tensor:
    """Non-negative int32 `values`, each under 2^width and 1 <= width <= 31, end to end."""
    count = values.numel()
    words = torch.zeros(words_of(count * width) + 1, dtype=torch.int64, device=values.device)
    start = torch.arange(count, device=values.device) * width
    shifted = values.to(torch.int64) << (start & 31)  # at most 31 + 31 bits, so a lane touches two words
    words.index_add_(0, start >> 5, shifted & _WORD_MASK)
    words.index_add_(0, (start >> 5) + 1, shifted >> _WORD_BITS)
    return _to_int32(words[:-1])


@kernel
def unpack_lanes(words: Tensor, count: int, width: int) -> Tensor:
    """The inverse of pack_lanes."""
    wide = torch.cat([words.to(torch.int64) & _WORD_MASK, words.new_zeros(1, dtype=torch.int64)])
    start = torch.arange(count, device=words.device) * width
    # The upper word is cut to 31 bits so that the pair fits a signed 64-bit integer; a lane never needs bit 63.
    pair = wide[start >> 5] | ((wide[(start >> 5) + 1] & (_WORD_MASK >> 1)) << _WORD_BITS)
    return ((pair >> (start & 31)) & ((1 << width) - 1)).to(torch.int32)


@kernel
def encode_elias_fano(positions: Tensor, width: int, num_high_bits: int) -> Tensor:
    """Low `width` bits of each ascending int32 position as lanes, then ones at (position >> width) + i."""
    order = torch.arange(positions.numel(), device=positions.device, dtype=torch.int32)
    high = set_bits((positions >> width) + order, num_high_bits)
    if width == 0:
        return high
    return torch.cat([pack_lanes(positions & ((1 << width) - 1), width), high])


@kernel
def decode_elias_fano(words: Tensor, n: int, k: int, width: int) -> Tensor:
    """The positions again, int32; fewer or more than k if `words` are no code of k ascending positions under n.

    With rows, those of each, and none if one of them is no code.
    """
    if words.dim() == 2:
        rows = [decode_elias_fano(row, n, k, width) for row in words]
        return torch.stack(rows) if all(len(row) == k for row in rows) else words.new_empty(len(rows), 0)
    num_low_words = words_of(k * width)
    ones = unpack_bits(words[num_low_words:])
    if ones.numel() != k or k == 0:
        return ones
    high = ones - torch.arange(k, device=words.device, dtype=torch.int32)
    low = unpack_lanes(words[:num_low_words], k, width) if width else 0
    positions = (high.to(torch.int64) << width) | low
    rising = bool((positions[1:] > positions[:-1]).all()) and int(positions[-1]) < n
    return positions.to(torch.int32) if rising else positions[:0].to(torch.int32)


@kernel
def read_elias_fano(words: Tensor, n: int, k: int, width: int, damaged: Tensor) -> Tensor:
    """The positions of each row, int32, k of them under n in any case; `damaged`, one int32, is set if one is no code.

    Whoever wants to know looks later.
    """
    positions = decode_elias_fano(words, n, k, width)
    if positions.shape[1] == k:
        return positions
    damaged.fill_(1)
    return words.new_zeros(len(words), k)


@kernel
def check_sum(words: Tensor) -> Tensor:
    """The sum over i of mix(pair_i + (i + 1)*g) of each row modulo 2^64, int64, 0-d where there is one row.

    A pair is two words as one number of 64 bits, the second of the last pair 0 where their number is odd. mix is the
    finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), g its step. It is a bijection, so any change within
    one pair changes the sum; other changes leave it as it was about as often as a random number of 64 bits would be.
    """
    even = words if words.shape[-1] % 2 == 0 else torch.nn.functional.pad(words, (0, 1))
    wide = even.to(torch.int64)  # which wraps
    pairs = (wide[..., 0::2] & _WORD_MASK) | wide[..., 1::2] << _WORD_BITS
    place = torch.arange(1, pairs.shape[-1] + 1, device=words.device)
    return _mixed(pairs + place * _signed(0x9E3779B97F4A7C15)).sum(-1)


@kernel
def seal_(words: Tensor, head: Sequence[int]) -> None:
    """Write the seven numbers of a `head` after a frame's first two words, and the sum of all others over those two.

    Those are zero before.
    """
    words[2 : 2 + len(head)] = torch.tensor(head, dtype=torch.int32, device=words.device)
    words[:2] = check_sum(words[2:]).view(1).view(torch.int32)


def _mixed(z: Tensor) -> Tensor:
    """Numbers of 64 bits of which every bit depends on every bit of the given one."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return z >> by & (1 << 64 - by) - 1


def _signed(number: int) -> int:
    """The int64 of the same bits as a number over 2^63."""
    return number - (1 << 64)


def _to_int32(words: Tensor) -> Tensor:
    """The low 32 bits of each int64, as int32, without relying on how a cast treats overflow."""
    low = words & _WORD_MASK
    return torch.where(low > _WORD_MASK >> 1, low - (1 << _WORD_BITS), low).to(torch.int32)


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
