"""The matrices of a bucket, and the orthonormal bases that they are multiplied by."""

from collections.abc import Sequence
from typing import ClassVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels import hash_64
from laconic.layout import Layout, positions_of
from laconic.select import LowRank

LEFT, RIGHT = range(2)  # P, which has a row for each row of M, and Q, which has one for each column


class Bases:
    """The kept bases of one bucket: for each matrix the orthonormal P of its last round above the orthonormal Q."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        self.kept = kept
        self.are_drawn = False  # not so when a parameter is new here, whose basis is zero


class BasesKeeper:
    """The frozen half of it, as a ledger wants it."""

    kinds: ClassVar[tuple[str, ...]] = ("bases",)

    def open(self, kept: list[Tensor]) -> Bases:
        return Bases(kept)


class Factors:
    """What a bucket of one layout sends: the factors of its matrices one after another, then what goes whole."""

    def __init__(self, select: LowRank, layout: Layout) -> None:
        self._select = select
        self._positions: Tensor | None = None
        self._places: dict[int, Tensor] = {}
        self._kept_places: dict[int, Tensor] = {}
        self.matrices = [span for span in layout.spans if select.is_factored(span)]
        self.plan = select.plan(layout, select.density)
        self._sizes = [(span.shape[0], span.num_entries // span.shape[0]) for span in self.matrices]
        names = [span.name for span in self.matrices]
        self.kept_layout = Layout.of(names, [select.rank * sum(sizes) for sizes in self._sizes])

    def count(self, side: int) -> int:
        """The numbers in all factors of one side."""
        return self._select.rank * sum(sizes[side] for sizes in self._sizes)

    def positions(self, device: torch.device) -> Tensor:
        """Of what goes whole, int64."""
        if self._positions is None or self._positions.device != device:
            self._positions = positions_of(self.plan.fixed, device)
        return self._positions

    def places(self, side: int, device: torch.device) -> Tensor:
        """(start, rows, columns, start of the other side's basis, start of its factor) of each matrix."""
        places = self._places.get(side)
        if places is None or places.device != device:
            starts = torch.tensor([span.start for span in self.matrices], dtype=torch.int64)
            sizes = torch.tensor(self._sizes, dtype=torch.int64).view(-1, 2)
            columns = [starts, *sizes.unbind(1), self._kept_starts(1 - side), self._said_starts(side)]
            places = self._places[side] = torch.stack(columns, 1).to(device)
        return places

    def renew_(self, bases: Bases, message: Tensor, side: int) -> None:
        """Overwrite the bases of one side with what spans the same as the factors in a message."""
        places = self._kept_places.get(side)
        if places is None or places.device != message.device:
            columns = [self._kept_starts(side), self._said_starts(side), self._rows(side)]
            places = self._kept_places[side] = torch.stack(columns, 1).to(message.device)
        kernels.orthonormal_(bases.kept[0], message, places, self._select.rank)

    def draw_(self, bases: Bases) -> None:
        """Give the parameters that have none first bases, drawn from (seed, name): the same on every worker."""
        kept = bases.kept[0]
        is_fresh = []
        for span in self.kept_layout.spans:
            fresh = kept[span.start : span.stop]
            is_fresh.append(not fresh.any())
            if is_fresh[-1]:
                key = hash_64(self._select.seed, crc32(span.name.encode()))
                # Whole numbers, of a generator whose raw output is the same everywhere, brought into (-1, 1).
                drawn = np.random.Philox(key=key).random_raw(fresh.numel()) >> np.uint64(40)
                fresh.copy_(torch.from_numpy((drawn + 0.5) / 2.0**23 - 1))
        for side in (LEFT, RIGHT):
            starts = self._kept_starts(side)
            places = torch.stack([starts, starts, self._rows(side)], 1)[torch.tensor(is_fresh, dtype=torch.bool)]
            kernels.orthonormal_(kept, kept, places.to(kept.device), self._select.rank)
        bases.are_drawn = True

    def _rows(self, side: int) -> Tensor:
        """Of each factor of one side."""
        return torch.tensor([sizes[side] for sizes in self._sizes], dtype=torch.int64)

    def _said_starts(self, side: int) -> Tensor:
        """Of each factor of one side in a message."""
        numbers = self._rows(side) * self._select.rank
        return numbers.cumsum(0) - numbers

    def _kept_starts(self, side: int) -> Tensor:
        """Of each basis of one side among those that are kept."""
        starts = torch.tensor([span.start for span in self.kept_layout.spans], dtype=torch.int64)
        return starts + (self._rows(LEFT) * self._select.rank if side == RIGHT else 0)
