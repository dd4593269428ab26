"""Who answers for which entries of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

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

    @cached_property
    def _begins(self) -> list[int]:
        """Where each share begins, with all of them end to end."""
        return list(accumulate((layout.num_entries for layout in self.layouts), initial=0))[:-1]

    def cut(self, positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        """For ascending positions in the bucket: their order by share, and the places within each share, ascending."""
        if self.num_shares == 1:
            return torch.arange(positions.numel(), device=positions.device), [positions.to(torch.int32)]
        starts, shifts = self._pieces(positions.device)
        piece = torch.searchsorted(starts, positions.to(torch.int64), right=True) - 1
        share = piece % self.num_shares
        order = torch.argsort(share, stable=True)
        places = (positions + shifts[piece])[order].to(torch.int32)
        return order, list(torch.split(places, torch.bincount(share, minlength=self.num_shares).tolist()))

    def positions(self, places: Sequence[Tensor]) -> Tensor:
        """Where places within each share lie in the bucket, int64, one share after the other."""
        if self.num_shares == 1:
            return places[0].to(torch.int64)
        starts, shifts = self._pieces_by_share(places[0].device)
        at = torch.cat([place.to(torch.int64) + begin for place, begin in zip(places, self._begins, strict=True)])
        # Of pieces that begin at the same place all but the last are empty.
        return at + shifts[torch.searchsorted(starts, at, right=True) - 1]

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

    def _pieces_by_share(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each piece, with all shares end to end: where it begins, and what leads from there to the bucket."""
        if device not in self._by_share:
            starts, shifts = self._pieces(device)
            at = (starts + shifts).view(-1, self.num_shares) + torch.tensor(self._begins, device=device)
            back = starts.view(-1, self.num_shares) - at
            self._by_share[device] = at.T.reshape(-1), back.T.reshape(-1)
        return self._by_share[device]

    @cached_property
    def _in_order(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _by_share(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}


def piece_borders(num_entries: int, num_shares: int) -> Sequence[int]:
    """Where the pieces of a parameter begin, and where the last one ends."""
    return [num_entries * share // num_shares for share in range(num_shares + 1)]
