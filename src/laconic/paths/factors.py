"""The matrices of a bucket as stacks of equal ones, and the orthonormal bases that they are multiplied by."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels.draws import hash_64
from laconic.layout import Layout, Span, positions_of
from laconic.select import LowRank

LEFT, RIGHT = range(2)  # P, which has a row for each row of M, and Q, which has one for each column


@dataclass(frozen=True)
class _Stack:
    """Parameters of one shape at even distances of each other: one tensor [count, rows, cols], without a copy."""

    spans: tuple[Span, ...]
    rank: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows of P and of Q."""
        first = self.spans[0]
        return first.shape[0], first.num_entries // first.shape[0]

    def num_entries(self, side: int) -> int:
        return len(self.spans) * self.sizes[side] * self.rank

    def matrices(self, flat: Tensor) -> Tensor:
        rows, cols = self.sizes
        first, second = self.spans[0], self.spans[min(1, len(self.spans) - 1)]
        strides = (second.start - first.start, cols, 1)
        return flat.as_strided((len(self.spans), rows, cols), strides, flat.storage_offset() + first.start)


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
    """What a bucket of one layout sends: the factors of its stacks one after another, then what goes whole."""

    def __init__(self, select: LowRank, layout: Layout) -> None:
        self._select = select
        self._positions: Tensor | None = None
        self._places: dict[int, Tensor] = {}
        self.stacks = [_Stack(run, select.rank) for run in _runs(layout, select)]
        self.plan = select.plan(layout, select.density)
        self._sizes = [stack.sizes for stack in self.stacks for _ in stack.spans]
        names = [span.name for stack in self.stacks for span in stack.spans]
        self.kept_layout = Layout.of(names, [select.rank * sum(sizes) for sizes in self._sizes])

    def count(self, side: int) -> int:
        """The numbers in all factors of one side."""
        return sum(stack.num_entries(side) for stack in self.stacks)

    def positions(self, device: torch.device) -> Tensor:
        """Of what goes whole, int64."""
        if self._positions is None or self._positions.device != device:
            self._positions = positions_of(self.plan.fixed, device)
        return self._positions

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """Views [count, rows, cols] of a flat buffer, one for each stack."""
        return [stack.matrices(flat) for stack in self.stacks]

    def said_in(self, message: Tensor, side: int) -> list[Tensor]:
        """The factors of one side, [count, size, rank] for each stack, as views of a message."""
        parts = message[: self.count(side)].split_with_sizes([stack.num_entries(side) for stack in self.stacks])
        return [part.view(-1, stack.sizes[side], stack.rank) for part, stack in zip(parts, self.stacks, strict=True)]

    def kept_of(self, bases: Bases, side: int) -> list[Tensor]:
        """The same of the bases that are kept."""
        pairs = zip(self._pairs(bases), self.stacks, strict=True)
        return [pair.split_with_sizes(stack.sizes, 1)[side] for pair, stack in pairs]

    def renew_(self, bases: Bases, message: Tensor, side: int) -> None:
        """Overwrite the bases of one side with what spans the same as the factors in a message."""
        places = self._places.get(side)
        if places is None or places.device != message.device:
            kept = self._kept_places(side)
            firsts = kept[:, 2].mul(self._select.rank).cumsum(0).roll(1)
            firsts[:1] = 0
            places = self._places[side] = torch.stack([kept[:, 0], firsts, kept[:, 2]], 1).to(message.device)
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
            places = self._kept_places(side)[torch.tensor(is_fresh, dtype=torch.bool)]
            kernels.orthonormal_(kept, kept, places.to(kept.device), self._select.rank)
        bases.are_drawn = True

    def _kept_places(self, side: int) -> Tensor:
        """(start, start, rows) of each basis of one side among those that are kept."""
        starts = [
            span.start + side * self._select.rank * sizes[LEFT]
            for span, sizes in zip(self.kept_layout.spans, self._sizes, strict=True)
        ]
        rows = [sizes[side] for sizes in self._sizes]
        return torch.tensor([starts, starts, rows], dtype=torch.int64).T.contiguous()

    def _pairs(self, bases: Bases) -> list[Tensor]:
        """[count, rows of P and Q, rank] for each stack."""
        parts = bases.kept[0].split_with_sizes(
            [stack.num_entries(LEFT) + stack.num_entries(RIGHT) for stack in self.stacks]
        )
        return [part.view(-1, sum(stack.sizes), stack.rank) for part, stack in zip(parts, self.stacks, strict=True)]


def _runs(layout: Layout, select: LowRank) -> Iterator[tuple[Span, ...]]:
    """Equal matrices at even distances, as the layers of a network are in their bucket."""
    by_shape: dict[tuple[int, int], list[Span]] = {}
    for span in layout.spans:
        if select.is_factored(span):
            by_shape.setdefault((span.shape[0], span.num_entries), []).append(span)
    for alike in by_shape.values():
        run = alike[:1]
        for span in alike[1:]:
            if len(run) > 1 and span.start - run[-1].start != run[1].start - run[0].start:
                yield tuple(run)
                run = []
            run.append(span)
        yield tuple(run)
