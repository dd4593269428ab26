"""Sparse vectors: the largest entries of one taken out of it, and frames of entries added up.

The GPU starts from the guess that the last step left. The CPU can afford a fresh sample, and only keeps the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import Key, kernel, note_
from laconic.kernels.host import nonzero
from laconic.kernels.reference.bits import set_bits, unpack_bits

_SAMPLE_ENTRIES = 16_384
_CHUNK = 1 << 20
_DRAW_ROUNDS = 6
_LOW_HALF = 0xFFFFFFFF


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as int32 bit patterns, which order like |x| with NaN above Inf; `x` is float32."""
    return x.view(torch.int32) & 0x7FFFFFFF


@kernel
def all_finite(x: Tensor, below: float = math.inf) -> bool:
    """Return whether all |x| are below a bound and none is NaN. The largest |x| tells; a sum may accuse finite data."""
    if x.numel() == 0:
        return True
    low, high = torch.aminmax(x)
    return bool((low > -below) & (high < below))


@kernel
def flag_nonfinite_(flag: Tensor, x: Tensor, below: float = math.inf) -> None:
    """Set `flag`, one int32, unless all |x| are below a bound and none is NaN; whoever wants to know looks later."""
    low, high = torch.aminmax(x)
    flag |= ~((low > -below) & (high < below))


@kernel
def zero_if_(x: Tensor, flag: Tensor) -> None:
    """x = 0 where `flag`, one int32, is set."""
    x.masked_fill_(flag.bool(), 0)


@kernel
def draw_distinct_(out: Tensor, n: int, start: int, key: Key) -> None:
    """Overwrite `out` (k <= n, int64) with the images of start, ..., start + k - 1 mod n, ascending.

    The permutation of [0, n) is a Feistel network over a grid of rows and columns of which n fill all but the end:
    row += draw(column) mod rows; column += draw(row) mod columns; three times each, and again from where a number of n
    or more comes out (Black and Rogaway, CT-RSA 2002). So every set of k is as good as drawn, without a table of n.
    """
    if not 0 <= out.numel() <= n < 1 << 31:
        raise KernelError(f"{out.numel()} of {n} cannot be drawn; give k <= n < 2^31")
    rows = math.isqrt(max(n - 1, 0)) + 1
    columns = -(-n // rows)
    x = (torch.arange(out.numel(), device=out.device) + start) % max(1, n)
    walks = torch.arange(out.numel(), device=out.device)  # places of numbers that are not there yet
    while walks.numel():
        number = x[walks]
        row, column = number // columns, number % columns
        for turn in range(0, _DRAW_ROUNDS, 2):
            row = (row + _drawn(column, turn, key, rows)) % rows
            column = (column + _drawn(row, turn + 1, key, columns)) % columns
        x[walks] = row * columns + column
        walks = walks[x[walks] >= n]
    out.copy_(x.sort().values)


def _drawn(v: Tensor, turn: int, key: Key, span: int) -> Tensor:
    """The high half of mix(v) * span: in [0, span), by lowbias32 (C. Wellons 2018), the key let in twice."""
    v = v ^ ((key[0] + 0x9E3779B9 * turn) & _LOW_HALF)
    v = (v ^ (v >> 16)) * 0x7FEB352D & _LOW_HALF
    v = v ^ (key[1] & _LOW_HALF)
    v = (v ^ (v >> 15)) * 0x846CA68B & _LOW_HALF
    return (v ^ (v >> 16)) * span >> 32


@kernel
def mean_magnitude(x: Tensor) -> Tensor:
    """The mean of |x|, a 0-d float64; a float32 sum over 25 M entries would be off by 5 %."""
    sums = [chunk.abs().to(torch.float64).sum() for chunk in torch.split(x, _CHUNK)]
    return torch.stack(sums).sum() / x.numel()


@kernel
def count_at_least(x: Tensor, thresholds: Tensor) -> Tensor:
    """The number of |x| that reach each of the float32 `thresholds`, int64."""
    bits = magnitude_bits(x)
    least = magnitude_bits(thresholds)
    return torch.stack([(bits >= one).sum() for one in least])


@kernel
def withdraw_(
    balance: Tensor, addend: Tensor | None, k: int, search: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """balance += factor*addend, each product and sum rounded; then take the exactly k largest |balance| out of it.

    Returns their positions (ascending, int32) and values, and leaves zeros in their places; of equal ones the first
    are taken, NaN is larger than Inf. `search` (of kernels.new_search) only says where to look first.
    """
    if addend is not None:
        balance.add_(addend if factor == 1 else addend * factor)
    mean = float(mean_magnitude(balance))
    positions, passes = _top_k(balance, k)
    values = balance[positions]
    balance[positions] = 0
    kth = float(values.abs().nan_to_num(torch.inf, torch.inf).min())
    note_(search, kth=kth, mean=mean, passes=passes)
    return positions.to(torch.int32), values


def _top_k(x: Tensor, k: int) -> tuple[Tensor, int]:
    """Positions of the k largest |x|, and the passes it took; of equal ones the first are taken.

    torch.topk leaves the order of ties open, so it only gives the k-th value; and it ranks only the candidates above a
    threshold that a sample suggests: 3 ms instead of 21 for the 1.2 M entries of a small net, on one thread.
    """
    bits = magnitude_bits(x)
    if k >= bits.numel():
        return torch.arange(bits.numel(), device=x.device), 1
    candidates = nonzero(bits >= _likely_threshold(bits, k))
    passes = 1
    if candidates.numel() < k:
        candidates = torch.arange(bits.numel(), device=x.device)
        passes = 2
    ranked = bits[candidates]
    kth = torch.topk(ranked, k, sorted=False).values.min()
    chosen = ranked > kth
    ties = nonzero(ranked == kth)
    chosen[ties[: k - int(chosen.sum())]] = True
    return candidates[chosen], passes


def _likely_threshold(bits: Tensor, k: int) -> Tensor:
    """A value that about 1.3*k entries reach, most likely; only the speed of the caller depends on it."""
    sample = bits[:: max(1, bits.numel() // _SAMPLE_ENTRIES)]
    expected = k * sample.numel() / bits.numel()
    rank = min(sample.numel(), round(expected + 4 * expected**0.5 + 4))  # four sigma of a binomial, and a few
    return torch.topk(sample, rank, sorted=False).values.min()


@kernel
def join_(out: Tensor, pieces: Sequence[Tensor], addend: Tensor | None = None) -> None:
    """out = the pieces end to end, plus `addend` if given; all float32. A piece may lie where it goes.

    One piece and an addend make a sum of two vectors: join_(out, [a], b).
    """
    torch._foreach_copy_(list(torch.split(out, [piece.numel() for piece in pieces])), list(pieces))
    if addend is not None:
        out.add_(addend)


@kernel
def add_at_(total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """total[positions[f]] += values[f] for each frame f in turn, so that everyone who adds them gets the same bits.

    Positions are int32, ascending within a frame and under total.numel(); values are float32.
    """
    for at, what in zip(positions, values, strict=True):
        total.index_add_(0, at, what)


@kernel
def sum_over_union_(
    total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor], *, take: bool
) -> tuple[Tensor, Tensor]:
    """add_at_, and then (places, sums): where any frame adds, ascending, int32, and the totals there.

    Those become zero if they are to be taken.
    """
    add_at_(total, positions, values)
    places = unpack_bits(set_bits(torch.cat(list(positions)), total.numel()))  # a map of bits, so nothing is sorted
    sums = total.index_select(0, places)
    if take:
        total.index_fill_(0, places.to(torch.int64), 0)
    return places, sums
