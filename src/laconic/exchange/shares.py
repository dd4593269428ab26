"""Who answers for which entries of a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic.layout import Layout


@dataclass(frozen=True)
class Shares:
    """P owners divide a bucket: each parameter is cut into P pieces of nearly equal length, piece p for owner p.

    So a share does not depend on how parameters are put into buckets, and every layer is spread over all owners. Within
    a share the pieces lie end to end, in the bucket's order: that is a layout too, of the same names.
    """

    layout: Layout
    num_shares: int

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each share."""
        cuts = [piece_borders(span.num_entries, self.num_shares) for span in self.layout.spans]
        return tuple(
            Layout.of(self.layout.names, [cut[p + 1] - cut[p] for cut in cuts]) for p in range(self.num_shares)
        )

    def cut(self, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """For ascending positions in the bucket: their order by share, and the places within each share, ascending."""
        if self.num_shares == 1:
            return torch.arange(positions.numel(), device=positions.device), [positions.to(torch.int32)]
        starts, shifts = (each.to(positions.dtype) for each in self._pieces(positions.device))
        begins, counts = _runs(positions, starts)
        by_share = counts.view(-1, self.num_shares).T
        counts, begins, shifts = (self._share_by_share(each) for each in (counts, begins, shifts))
        leaps = begins - (counts.cumsum(0) - counts)
        order = torch.arange(positions.numel(), device=positions.device) + _repeated(leaps, counts, positions)
        places = (positions[order] + _repeated(shifts, counts, positions)).to(torch.int32)
        return order, list(torch.split(places, by_share.sum(1).tolist()))

    def positions(self, places: Sequence[Tensor]) -> Tensor:
        """Where ascending places within each share lie in the bucket, int64, one share after the other."""
        if self.num_shares == 1:
            return places[0].to(torch.int64)
        starts, shifts = self._pieces_by_share(places[0].device)
        counts = [_runs(place, begins)[1] for place, begins in zip(places, starts, strict=True)]
        at = torch.cat(list(places))
        return (at + _repeated(shifts, torch.cat(counts), at)).to(torch.int64)

    def _pieces(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each piece, in the bucket's order: where it begins, and what leads from the bucket to its share."""
        if device not in self._in_order:
            starts, shifts = [], []
            for number, span in enumerate(self.layout.spans):
                for share, border in enumerate(piece_borders(span.num_entries, self.num_shares)[:-1]):
                    starts.append(span.start + border)
                    shifts.append(self.layouts[share].spans[number].start - starts[-1])
            self._in_order[device] = torch.tensor(starts, device=device), torch.tensor(shifts, device=device)
        return self._in_order[device]

    def _share_by_share(self, pieces: Tensor) -> Tensor:
        """What is told of the pieces in the bucket's order, in the order of shares."""
        return pieces.view(-1, self.num_shares).T.reshape(-1)

    def _pieces_by_share(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Share by share, of each piece: where it begins there, and what leads from there to the bucket; int32."""
        if device not in self._by_share:
            starts, shifts = (each.to(torch.int32) for each in self._pieces(device))
            own = self._share_by_share(starts + shifts).view(self.num_shares, -1)
            self._by_share[device] = list(own), self._share_by_share(-shifts)
        return self._by_share[device]

    @cached_property
    def _in_order(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _by_share(self) -> dict[torch.device, tuple[list[Tensor], Tensor]]:
        return {}


def _runs(ascending: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Of the pieces that begin at `starts`: where the run of its entries begins among the ascending, and its length.

    A search for each piece, of which there are few, not for each entry. Of pieces that begin at the same place all but
    the last are empty.
    """
    begins = torch.searchsorted(ascending, starts)
    return begins, torch.diff(begins, append=begins.new_tensor([ascending.numel()]))


def _repeated(pieces: Tensor, counts: Tensor, entries: Tensor) -> Tensor:
    """What is told of each piece, told of each of its entries."""
    return torch.repeat_interleave(pieces, counts, output_size=entries.numel())


def piece_borders(num_entries: int, num_shares: int) -> Sequence[int]:
    """Where the pieces of a parameter begin, and where the last one ends."""
    return [num_entries * share // num_shares for share in range(num_shares + 1)]
