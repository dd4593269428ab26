"""Who answers for which entries of a bucket."""

from __future__ import annotations

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
        starts, shifts = self._pieces(positions.device)
        piece = torch.searchsorted(starts, positions.to(torch.int64), right=True) - 1
        share = piece % self.num_shares
        order = torch.argsort(share, stable=True)
        places = (positions + shifts[piece])[order].to(torch.int32)
        return order, list(torch.split(places, torch.bincount(share, minlength=self.num_shares).tolist()))

    def positions(self, share: int, places: Tensor) -> Tensor:
        """Where places within a share lie in the bucket, int64."""
        if self.num_shares == 1:
            return places.to(torch.int64)
        _, shifts = self._pieces(places.device)
        own = torch.tensor([span.start for span in self.layouts[share].spans], device=places.device)
        # Of pieces that begin at the same place all but the last are empty.
        span = torch.searchsorted(own, places.to(torch.int64), right=True) - 1
        return places.to(torch.int64) - shifts[span * self.num_shares + share]

    def _pieces(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each piece, in the bucket's order: where it begins, and what leads from the bucket to its share."""
        if device not in self._on_device:
            starts, shifts = [], []
            for number, span in enumerate(self.layout.spans):
                for share, border in enumerate(piece_borders(span.num_entries, self.num_shares)[:-1]):
                    starts.append(span.start + border)
                    shifts.append(self.layouts[share].spans[number].start - starts[-1])
            self._on_device[device] = torch.tensor(starts, device=device), torch.tensor(shifts, device=device)
        return self._on_device[device]

    @cached_property
    def _on_device(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}


def piece_borders(num_entries: int, num_shares: int) -> Sequence[int]:
    """Where the pieces of a parameter begin, and where the last one ends."""
    return [num_entries * share // num_shares for share in range(num_shares + 1)]
