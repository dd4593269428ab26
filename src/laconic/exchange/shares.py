"""The owners of the entries of a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic.kernels import joined_runs, repeated
from laconic.layout import Layout

_LONG_RUN = 500  # entries, on average, from which on runs are copied sooner than entries are looked up


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

    def split(self, whole: Tensor) -> list[Tensor]:
        """What the entries of a whole bucket are in each share."""
        lengths = zip(*([span.num_entries for span in own.spans] for own in self.layouts), strict=True)
        pieces = torch.split(whole, [length for of_parameter in lengths for length in of_parameter])
        return [torch.cat(pieces[p :: self.num_shares]) for p in range(self.num_shares)]

    def unsplit(self, shares: Sequence[Tensor]) -> Tensor:
        """What the entries of all shares are in the whole bucket."""
        both = zip(shares, self.layouts, strict=True)
        pieces = [torch.split(share, [span.num_entries for span in own.spans]) for share, own in both]
        return torch.cat([piece for of_parameter in zip(*pieces, strict=True) for piece in of_parameter])

    def cut(self, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """For ascending positions in the bucket: their order by share, and the places within each share, ascending."""
        if self.num_shares == 1:
            return torch.arange(positions.numel(), device=positions.device), [positions.to(torch.int32)]
        starts, _, shifts = self.pieces(positions.device)
        runs = _runs(positions, starts.view(-1).to(positions.dtype))
        begins, counts = (self._turned(each.view(-1, self.num_shares)) for each in runs)  # share by share
        order = _in_order(begins, counts, positions)
        moved = repeated(shifts.view(-1), counts, positions.numel())
        places = positions.index_select(0, order).sub_(moved).to(torch.int32)
        return order, list(torch.split(places, counts.view(self.num_shares, -1).sum(1).tolist()))

    def joined(self, places: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The positions in the bucket of ascending places of each share, int64, ascending, and their values."""
        if self.num_shares == 1:
            return places[0].to(torch.int64), values[0]
        starts, within, shifts = self.pieces(places[0].device)
        total = sum(place.numel() for place in places)
        if places[0].device.type == "cpu" and total > _LONG_RUN * starts.numel():
            return joined_runs(places, values, within, shifts)
        counts = torch.stack([_runs(place, begins)[1] for place, begins in zip(places, within, strict=True)])
        begins = (counts.view(-1).cumsum(0) - counts.view(-1)).view_as(counts)
        begins, counts, shifts = (self._turned(each) for each in (begins, counts, shifts))
        at = torch.cat(list(places))
        order = _in_order(begins, counts, at)
        positions = at.index_select(0, order).add_(repeated(shifts, counts, total)).to(torch.int64)
        return positions, torch.cat(list(values)).index_select(0, order)

    @staticmethod
    def _turned(pieces: Tensor) -> Tensor:
        """The pieces by column instead of by row, end to end."""
        return pieces.T.reshape(-1)

    def pieces(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The starts of the pieces in the bucket [parameter, share] and within shares [share, parameter], and shifts.

        The shift of a piece [share, parameter] leads from its share to the bucket; all are int32.
        """
        if device not in self._on_device:
            cuts = [(span.start, piece_borders(span.num_entries, self.num_shares)[:-1]) for span in self.layout.spans]
            starts = torch.tensor([[start + border for border in cut] for start, cut in cuts], dtype=torch.int32)
            within = torch.tensor([[s.start for s in own.spans] for own in self.layouts], dtype=torch.int32)
            shifts = starts.view(-1, self.num_shares).T - within
            self._on_device[device] = starts.to(device), within.to(device), shifts.contiguous().to(device)
        return self._on_device[device]

    @cached_property
    def _on_device(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        return {}


def _runs(ascending: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Of the pieces that begin at `starts`: where the run of its entries begins among the ascending, and its length.

    A search for each piece, of which there are few, not for each entry. Of pieces that begin at the same place all but
    the last are empty.
    """
    begins = torch.searchsorted(ascending, starts)
    return begins, torch.diff(begins, append=begins.new_tensor([ascending.numel()]))


def _in_order(begins: Tensor, counts: Tensor, entries: Tensor) -> Tensor:
    """The places of the entries of runs that begin there, one run after the other."""
    leaps = begins - (counts.cumsum(0) - counts)
    return repeated(leaps, counts, entries.numel()).add_(torch.arange(entries.numel(), device=entries.device))


def piece_borders(num_entries: int, num_shares: int) -> Sequence[int]:
    """The starts of the pieces of a parameter, and the end of the last one."""
    return [num_entries * share // num_shares for share in range(num_shares + 1)]
