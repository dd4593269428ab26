"""A bucket whose entries others answer for: frames of bf16 values behind Rice's code, several at once; their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.kernels.contract import kernel
from laconic.kernels.host import nonzero
from laconic.kernels.reference.bits import check_sum, decode_rice, encode_rice
from laconic.kernels.reference.sparse import all_finite, sum_over_union_, withdraw_

HEAD_WORDS, COUNT_AT = 10, 5  # as wire/frame.py has them: the first two are a check sum, and one is the number k
_TOP = torch.finfo(torch.bfloat16).max  # above it rounding would give Inf


class Blocks(NamedTuple):
    """What lies behind the head of such a frame: words of an index, k positions under n, values, the last k there."""

    num_index_words: int
    n: int
    k: int
    num_values: int


@kernel
def write_rice_frames(
    positions: Sequence[Tensor], values: Sequence[Tensor], heads: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Each as (frame, its values as it holds them): a head, Rice's code of the positions, the values as bf16.

    Positions are int32 and ascend, one of them or more; values are finite float32. Of a head the check sum and the
    number of positions are put in.
    """
    written = []
    for at, what, head in zip(positions, values, heads, strict=True):
        codes = what.clamp(-_TOP, _TOP).to(torch.bfloat16)
        padded = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(torch.int32)
        words = torch.cat([torch.tensor(head, dtype=torch.int32, device=what.device), encode_rice(at), padded])
        words[COUNT_AT] = at.numel()
        words[:2] = check_sum(words[2:]).view(1).view(torch.int32)
        written.append((words.view(torch.uint8), codes.to(torch.float32)))
    return written


@kernel
def read_rice_frames(frames: Sequence[Tensor], blocks: Sequence[Blocks]) -> list[tuple[Tensor, Tensor]] | None:
    """(positions, values) of each; None where a sum, an index or a value is wrong. Heads are as they should be."""
    contents = [_read(frame.view(torch.int32), each) for frame, each in zip(frames, blocks, strict=True)]
    return None if None in contents else [each for each in contents if each is not None]


def _read(words: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor] | None:
    if int(check_sum(words[2:])) != int(words[:2].view(torch.int64)):
        return None
    index, codes = words[HEAD_WORDS:].tensor_split([blocks.num_index_words])
    positions = decode_rice(index, blocks.n, blocks.k)
    values = codes.view(torch.bfloat16)[: blocks.num_values].to(torch.float32)
    return (positions, values) if positions.numel() == blocks.k and bool(values.isfinite().all()) else None


Window = tuple[int, int, int]  # where it starts and stops, and how many of its entries may be sent


class Pieces(NamedTuple):
    """How a bucket of S parameters is cut among P owners: each parameter into P pieces, piece p for owner p.

    All lie on one device.
    """

    starts: Tensor  # in the bucket, int32 [S, P]
    within: Tensor  # in the owner's share, int32 [P, S]
    ways: Tensor  # from there to the bucket, int32 [P, S]
    fixed_lengths: Tensor  # of those pieces whose entries go at every step, int64 [number of such parameters, P]


@kernel
def write_parts(
    positions: Tensor, values: Tensor, pieces: Pieces, heads: Sequence[Sequence[int]], decoded: Tensor
) -> list[Tensor] | None:
    """A frame for each owner, as `write_rice_frames` writes them; `decoded` becomes the values as they hold them.

    Positions are int32, ascend and lie in the bucket; values are those of the fixed entries, then those at positions.
    None where there is an owner of none of these positions.
    """
    num_owners = len(heads)
    owner_of_piece = torch.arange(num_owners, device=values.device).repeat(len(pieces.starts))
    piece = torch.searchsorted(pieces.starts.view(-1), positions, right=True) - 1
    owners_of_fixed = owner_of_piece[: pieces.fixed_lengths.numel()].repeat_interleave(pieces.fixed_lengths.view(-1))
    owners = torch.cat([owners_of_fixed, owner_of_piece[piece]])
    places = positions - pieces.ways.T.reshape(-1)[piece]
    entries_of = [nonzero(owners == owner) for owner in range(num_owners)]
    chosen = [nonzero(owner_of_piece[piece] == owner) for owner in range(num_owners)]
    if not all(at.numel() for at in chosen):
        return None
    written = write_rice_frames([places[at] for at in chosen], [values[at] for at in entries_of], heads)
    for at, (_, what) in zip(entries_of, written, strict=True):
        decoded[at] = what
    return [frame for frame, _ in written]


@kernel
def read_answers(
    frames: Sequence[Tensor], blocks: Sequence[Blocks], pieces: Pieces, positions: Tensor, values: Tensor
) -> bool:
    """Put together what owners answer: values of fixed entries, owner after owner, then those of the others in order.

    `positions`, int64, becomes where those others lie in the bucket. False where a frame is wrong, as above.
    """
    contents = read_rice_frames(frames, blocks)
    if contents is None:
        return False
    at = []
    for (places, _), within, ways in zip(contents, pieces.within, pieces.ways, strict=True):
        at.append(places.to(torch.int64) + ways[torch.searchsorted(within, places, right=True) - 1])
    order = torch.cat(at).argsort()
    num_fixed = [each.num_values - each.k for each in blocks]
    halves = [values_of.tensor_split([count]) for (_, values_of), count in zip(contents, num_fixed, strict=True)]
    positions.copy_(torch.cat(at)[order])
    values.copy_(torch.cat([*(fixed for fixed, _ in halves), torch.cat([rest for _, rest in halves])[order]]))
    return True


@kernel
def take_mean_(
    held: Tensor,
    fixed: Tensor,
    positions: Sequence[Tensor],
    values: Sequence[Tensor],
    windows: Sequence[Window],
    searches: Sequence[Tensor],
    spare: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor]:
    """Add frames to what is held, and take out what is sent of it: (places, means at the fixed entries and there).

    Values are those at the fixed entries, then those at ascending positions. Of each window the largest sums are sent,
    no more than frames hold there: else the rest of the room would go to what answers have rounded away; where
    there is no window, all that they hold. Zeros are not worth a place. What is held of a spare range that no
    frame touches stays. A sum beyond float32 is the largest there.
    """
    return take_mean_by(_REFERENCE, held, fixed, positions, values, windows, searches, spare)


class MeanKernels(NamedTuple):
    """The kernels that `take_mean_` is made of on one device."""

    sum_over_union_: Callable[..., tuple[Tensor, Tensor]]
    withdraw_: Callable[..., tuple[Tensor, Tensor]]
    all_finite: Callable[[Tensor], bool]


_REFERENCE = MeanKernels(sum_over_union_, withdraw_, all_finite)


def take_mean_by(
    by: MeanKernels,
    held: Tensor,
    fixed: Tensor,
    positions: Sequence[Tensor],
    values: Sequence[Tensor],
    windows: Sequence[Window],
    searches: Sequence[Tensor],
    spare: Sequence[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """`take_mean_` by these kernels."""
    whole = held.index_select(0, fixed)
    held.index_fill_(0, fixed, 0)
    for each in values:
        whole += each[: fixed.numel()]
    selected = [each[fixed.numel() :] for each in values]
    places, sums = by.sum_over_union_(held, positions, selected, take=not windows)
    if not (by.all_finite(whole) and by.all_finite(sums)):
        whole.nan_to_num_(nan=0.0)
        sums.nan_to_num_(nan=0.0)
        if windows:
            held.index_copy_(0, places.to(torch.int64), sums)
    if windows and places.numel():
        counted = zip(spare, _within(spare, places), strict=True)
        silent = [held[start:stop] for (start, stop), count in counted if not count]
        aside = [each.clone() for each in silent]
        for each in silent:
            each.zero_()
        places, sums = _largest(by, held, places, windows, searches)
        for each, kept in zip(silent, aside, strict=True):
            each.copy_(kept)
    return places, torch.cat([whole, sums]).div_(len(values))


def _largest(
    by: MeanKernels, held: Tensor, touched: Tensor, windows: Sequence[Window], searches: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Those of each window, taken out; no zeros."""
    places = [touched[:0]]
    values = [held[:0]]
    counts = _within([window[:2] for window in windows], touched)
    for (start, stop, most), count, search in zip(windows, counts, searches, strict=True):
        if count:
            at, sums = by.withdraw_(held[start:stop], None, min(most, count), search)
            kept = nonzero(sums)
            places.append(at.index_select(0, kept).add_(start))
            values.append(sums.index_select(0, kept))
    return torch.cat(places), torch.cat(values)


@kernel
def owe_(held: Tensor, fixed: Tensor, places: Tensor, values: Tensor, decoded: Tensor, factor: float) -> None:
    """Add factor*(values - decoded) at the fixed entries, which come first in values, and at the places."""
    whole, chosen = ((values - decoded) * factor).tensor_split([fixed.numel()])
    held.index_add_(0, fixed, whole)
    held.index_add_(0, places.to(torch.int64), chosen)


def _within(ranges: Sequence[tuple[int, int]], positions: Tensor) -> list[int]:
    """The number of these ascending positions in each range."""
    ends = positions.new_tensor(ranges).view(-1, 2)
    counts: list[int] = torch.searchsorted(positions, ends).diff().flatten().tolist()
    return counts
