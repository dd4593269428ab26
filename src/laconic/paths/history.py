"""What a worker remembers of the answers it heard: the same on all workers, but for when it sent an entry itself."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from laconic.kernels import nonzero
from laconic.memory import Due
from laconic.select import BucketPlan, Overlap
from laconic.select.scores import Score


class Told(NamedTuple):
    """Of which entries the past speaks, what it says of them, and the mean of that over all, once each."""

    at: Tensor
    sizes: Tensor
    mean: Tensor


class History:
    """That of one bucket; `kept` are two flat float32 tensors, which it mutates."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        self.kept = kept
        self.past = kept[0]  # what the score looks at
        self.num_steps = 0  # as far as this is known
        self.sent_at = kept[1]  # the number of the step that sent an entry last, or 0
        self.room = 0  # entries that are always told of, where a recording looks at them; 0: as many as there are
        self._told: Told | None = None
        self._in_room: Told | None = None

    @property
    def told(self) -> Told:
        """Where `past` is not zero, ascending, and what it is there: side by side, since memory is slow to leap in."""
        if self._told is None:
            at = nonzero(self.past != 0)
            self._tell(at, self.past.index_select(0, at))
        assert self._told is not None
        return self._told

    def _tell(self, at: Tensor, sizes: Tensor) -> None:
        """Where there is room, the last entry is told of again and again, always in the same tensors."""
        count = at.numel()
        self._told = Told(at, sizes, sizes.mean(dtype=torch.float64).to(sizes.dtype))
        if not 0 < count <= self.room:
            return
        if self._in_room is None:
            self._in_room = Told(at.new_empty(self.room), sizes.new_empty(self.room), sizes.new_empty(()))
        for room, told in zip(self._in_room[:2], self._told[:2], strict=True):
            room[:count] = told
            room[count:] = told[-1]
        self._in_room.mean.copy_(self._told.mean)
        self._told = self._in_room

    def restored(self) -> None:
        """Someone has written to the kept tensors."""
        self._told = None

    def note_(self, score: Score, union: Tensor, aggregate: Tensor) -> None:
        """Take in an answer: the entries in it, ascending, and its values there."""
        if score.note_ is not None:
            before = self.told.at
            score.note_(self.past, before, union, aggregate)
            if before.is_cuda:  # made on the stream that chooses, whose next tensor could lie here too soon
                before.record_stream(torch.cuda.current_stream(before.device))
            self._told = None
            if not score.fades:
                self._tell(union, self.past.index_select(0, union))

    def sent_(self, positions: Tensor, step: int) -> None:
        """Note what this worker sent."""
        self.num_steps = step + 1
        self.sent_at.index_fill_(0, positions, self.num_steps)


class HistoryKeeper:
    """The frozen half of it, as a ledger wants it."""

    kinds: ClassVar[tuple[str, ...]] = ("past", "sent_at")

    def open(self, kept: list[Tensor]) -> History:
        return History(kept)


class Boost:
    """Lifts the entries that the past speaks of to their score while a selector looks, in |U| operations.

    The kernel that adds the gradient and selects sees a balance that is off there by as much as makes it the score.
    """

    def __init__(self, select: Overlap, plan: BucketPlan, history: History, balance: Tensor, due: Due) -> None:
        self._balance = balance
        self._at, sizes, mean = history.told
        if not self._at.numel():
            return
        owed = due.at(self._at)
        self._own = balance.index_select(0, self._at).add_(owed)
        score = select.scored
        lifted = self._own.clone()
        for window, (begin, end) in zip(plan.windows, self._borders(plan), strict=True):
            if begin == end:
                continue
            some = slice(begin, end)
            scale: float | Tensor = mean
            if score.needs_norm:
                inside = slice(window.start, window.stop)
                r = balance[inside] if due.addend is None else balance[inside].add(due.addend[inside], alpha=due.factor)
                scale = float(r.norm())
            elif score.needs_mean and len(plan.windows) > 1:
                scale = sizes[some].mean(dtype=torch.float64).to(sizes.dtype)
            lifted[some] = score.of(self._own[some].abs(), sizes[some], score.strength, scale)
        balance.index_copy_(0, self._at, lifted.sub_(owed))

    def _borders(self, plan: BucketPlan) -> list[list[int]]:
        """Where the entries of each window begin and end among those that the past speaks of."""
        if [(window.start, window.stop) for window in plan.windows] == [(0, plan.num_entries)]:
            return [[0, self._at.numel()]]
        borders = torch.tensor([[window.start, window.stop] for window in plan.windows], device=self._at.device)
        return torch.searchsorted(self._at, borders).tolist()

    def take_back_(self, chosen: Tensor, values: Tensor) -> Tensor:
        """Give the lifted entries their own values again, in the balance and in what was chosen, which it returns."""
        if not self._at.numel():
            return values
        chosen = chosen.to(torch.int64)
        self._balance.index_copy_(0, chosen, values)
        self._balance.index_copy_(0, self._at, self._own)
        values = self._balance.index_select(0, chosen)
        self._balance.index_fill_(0, chosen, 0)
        return values
