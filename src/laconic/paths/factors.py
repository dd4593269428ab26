"""The matrices of a bucket as stacks of equal ones, and the orthonormal bases that they are multiplied by."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from laconic.kernels.draws import hash_64
from laconic.layout import Layout, Span, positions_of
from laconic.select import LowRank

LEFT, RIGHT = range(2)  # P, which has a row for each row of M, and Q, which has one for each column

_RIDGE = 1e-12  # of unit columns; what float32 leaves of a column that depends on the others is 1e-15
_SMALLEST = 1e-300  # a square that is not zero


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
        self._seed = select.seed
        self._positions: Tensor | None = None
        self.stacks = [_Stack(run, select.rank) for run in _runs(layout, select)]
        self.plan = select.plan(layout, select.density)
        spans = [span for stack in self.stacks for span in stack.spans]
        rows = [span.shape[0] + span.num_entries // span.shape[0] for span in spans]
        self.kept_layout = Layout.of([span.name for span in spans], [select.rank * count for count in rows])

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

    def draw_(self, bases: Bases) -> None:
        """Give the parameters that have none first bases, drawn from (seed, name): the same on every worker."""
        for pair, stack in zip(self._pairs(bases), self.stacks, strict=True):
            for number, span in enumerate(stack.spans):
                fresh = pair[number : number + 1]
                if fresh.any():
                    continue
                key = hash_64(self._seed, crc32(span.name.encode()))
                # Whole numbers, of a generator whose raw output is the same everywhere, brought into (-1, 1).
                drawn = np.random.Philox(key=key).random_raw(fresh.numel()) >> np.uint64(40)
                fresh.copy_(torch.from_numpy(((drawn + 0.5) / 2.0**23 - 1).reshape(fresh.shape)))
                for basis in fresh.split_with_sizes(stack.sizes, 1):
                    orthonormal_([basis], [basis])
        bases.are_drawn = True

    def _pairs(self, bases: Bases) -> list[Tensor]:
        """[count, rows of P and Q, rank] for each stack."""
        parts = bases.kept[0].split_with_sizes(
            [stack.num_entries(LEFT) + stack.num_entries(RIGHT) for stack in self.stacks]
        )
        return [part.view(-1, sum(stack.sizes), stack.rank) for part, stack in zip(parts, self.stacks, strict=True)]


def orthonormal_(bases: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Overwrite bases with what spans the same as the factors: B = F T, where T^T (F^T F + a ridge) T = 1.

    F's columns are first brought to length 1. A column that depends on the others comes out short, never as NaN, so
    that B B^T stays within a projection; one of zeros leaves the basis as it was, or it would be zero for ever.
    Squares are float64: those of all float32 are in its range, and its error is far below their rounding.
    """
    if not bases:
        return
    filled = [
        torch.where(factor.any(1, keepdim=True), factor, basis).double()
        for basis, factor in zip(bases, factors, strict=True)
    ]
    gram = torch.cat([factor.mT @ factor for factor in filled])
    inverse_lengths = gram.diagonal(dim1=1, dim2=2).clamp_min(_SMALLEST).rsqrt()
    gram *= inverse_lengths.unsqueeze(1) * inverse_lengths.unsqueeze(2)
    gram.diagonal(dim1=1, dim2=2).add_(_RIDGE)
    turns = inverse_lengths.unsqueeze(2) * _inverse_root(gram)
    for basis, factor, turn in zip(bases, filled, turns.split_with_sizes([len(each) for each in filled]), strict=True):
        basis.copy_(factor @ turn)


def _inverse_root(gram: Tensor) -> Tensor:
    """The upper triangular T with T^T G T = 1, for each G of [count, rank, rank].

    Elimination takes of each row what those before it have of it, and does the same to 1. torch.linalg would do it
    too, but on a GPU not for the first time in two threads at once.
    """
    rank = gram.shape[1]
    rows = torch.cat([gram, torch.eye(rank, dtype=gram.dtype, device=gram.device).expand_as(gram)], 2)
    for number in range(rank):
        row = rows[:, number].mul_(rows[:, number, number, None].rsqrt())
        rows[:, number + 1 :].addcmul_(row[:, number + 1 : rank, None], row[:, None], value=-1)
    return rows[:, :, rank:].mT


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
