"""Push and pull of selections that have much in common, by a score of what all workers received before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.exchange import Shares
from laconic.kernels import merged, nonzero
from laconic.layout import positions_of
from laconic.memory import Due, Ledger
from laconic.paths.frames import FramePlan
from laconic.paths.path import Work
from laconic.paths.push_pull import PushPull
from laconic.select import BucketPlan, Overlap, Score


@dataclass
class ScoredPushPull(PushPull):
    """Selects the largest scores, which the past pulls together; a few entries are swept, whatever their score."""

    select: Overlap

    def __post_init__(self) -> None:
        super().__post_init__()
        self._histories = Ledger(("past", "sent_at"), _History)

    def _history(self, work: Work) -> "_History":
        history = self._histories.open(work.layout, work.device)
        if not history.room and self.captures(work):
            shares = Shares(work.layout, self.transport.num_shares).layouts
            history.room = sum(max(1, round((self.server.down_rho or 1.0) * own.num_entries)) for own in shares)
        return history

    def inputs(self, work: Work) -> Sequence[Tensor]:
        """The entries that are swept in this step."""
        return (self.select.swept(work.layout, work.density, work.step, work.number),)

    def uses(self, work: Work) -> Sequence[Tensor]:
        return self._history(work).past_entries

    def withdraw_(self, work: Work, plan: FramePlan, due: Due, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Take out the entries that are swept, then those with the largest scores.

        What was swept just now is not selected again, unless as a zero.
        """
        balance = work.account.balance
        (at,) = inputs
        owed = due.at(at)
        swept = balance.index_select(0, at).add_(owed)
        balance.index_copy_(0, at, -owed)  # the addition leaves zeros, which have no score and are not selected
        boost = _Boost(self.select, plan.plan, self._history(work), balance, due)
        selected, values = plan.withdraw_(balance, due)
        whole, values = values.tensor_split([plan.num_fixed])
        values = boost.take_back_(selected, values)
        selected, values = merged(at.to(torch.int32), swept, selected, values)
        return selected, torch.cat([whole, values])

    def kept(self, work: Work) -> Sequence[Tensor]:
        return self._history(work).kept

    def restored(self) -> None:
        for history in self._histories.opened.values():
            history.restored()

    def learn_(self, work: Work, selected: Tensor, union: Tensor, aggregate: Tensor) -> None:
        history = self._history(work)
        history.note_(self.select.scored, union, aggregate)
        history.sent_(selected, work.step)

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return super().figures() | (self._ages() if ages else {})

    def _ages(self) -> dict[str, Any]:
        """Steps for which what is owed longest has waited, and the share of entries that were never sent."""
        oldest = num_never = num_entries = 0
        for layout, history in self._histories.opened.items():
            device = history.past.device
            fixed = {span.name for span in self.select.plan(layout, self.select.density).fixed}
            free = positions_of([span for span in layout.spans if span.name not in fixed], device)
            sent_at = history.sent_at[free]
            owed = self.ledger.open(layout, device).balance[free] != 0
            num_entries += free.numel()
            num_never += int((sent_at == 0).sum())
            if bool(owed.any()):
                oldest = max(oldest, history.num_steps - int(sent_at[owed].min()))
        return {"oldest_residual": oldest, "never_sent": num_never / max(1, num_entries)}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"past": self._histories.state_dict()}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_state_dict(states)
        # What workers remember of the answers is the same on all of them.
        by_rank = {int(state["rank"]): state["past"] for state in states}
        rank = self.transport.rank
        self._histories.load_state_dict(dict(by_rank.get(rank) or states[rank % len(states)]["past"]))


class _PastEntries(NamedTuple):
    """The entries that the past speaks of, what it says of them, and the mean of that over all, once each."""

    at: Tensor
    sizes: Tensor
    mean: Tensor


class _History:
    """What a worker remembers of one bucket's answers: the same on all workers, but for when it sent an entry itself.

    `kept` are two flat float32 tensors, which it mutates.
    """

    def __init__(self, kept: Sequence[Tensor]) -> None:
        self.kept = kept
        self.past = kept[0]  # what the score looks at
        self.num_steps = 0  # as far as this is known
        self.sent_at = kept[1]  # the number of the step that sent an entry last, or 0
        self.room = 0  # entries that a captured step always looks at; 0: as many as there are
        self._entries: _PastEntries | None = None
        self._padded: _PastEntries | None = None

    @property
    def past_entries(self) -> _PastEntries:
        """Where `past` is not zero, ascending, and what it is there: side by side, since memory is slow to leap in."""
        if self._entries is None:
            at = nonzero(self.past != 0)
            self._set_entries(at, self.past.index_select(0, at))
        assert self._entries is not None
        return self._entries

    def _set_entries(self, at: Tensor, sizes: Tensor) -> None:
        """Where there is room for more, the last entry is repeated, always in the same tensors."""
        count = at.numel()
        self._entries = _PastEntries(at, sizes, sizes.mean(dtype=torch.float64).to(sizes.dtype))
        if not 0 < count <= self.room:
            return
        if self._padded is None:
            self._padded = _PastEntries(at.new_empty(self.room), sizes.new_empty(self.room), sizes.new_empty(()))
        for room, entries in zip(self._padded[:2], self._entries[:2], strict=True):
            room[:count] = entries
            room[count:] = entries[-1]
        self._padded.mean.copy_(self._entries.mean)
        self._entries = self._padded

    def restored(self) -> None:
        """Someone has written to the kept tensors."""
        self._entries = None

    def note_(self, score: Score, union: Tensor, aggregate: Tensor) -> None:
        """Take in an answer: the entries in it, ascending, and its values there."""
        if score.note_ is not None:
            before = self.past_entries.at
            score.note_(self.past, before, union, aggregate)
            if before.is_cuda:  # made on the stream that chooses, whose next tensor could lie here too soon
                before.record_stream(torch.cuda.current_stream(before.device))
            self._entries = None
            if not score.fades:
                self._set_entries(union, self.past.index_select(0, union))

    def sent_(self, positions: Tensor, step: int) -> None:
        """Note what this worker sent."""
        self.num_steps = step + 1
        self.sent_at.index_fill_(0, positions, self.num_steps)


class _Boost:
    """Lifts the entries that the past speaks of to their score while a selector looks, in |U| operations.

    The kernel that adds the gradient and selects sees a balance that is off there by as much as makes it the score.
    """

    def __init__(self, select: Overlap, plan: BucketPlan, history: _History, balance: Tensor, due: Due) -> None:
        self._balance = balance
        self._at, sizes, mean = history.past_entries
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

    def take_back_(self, selected: Tensor, values: Tensor) -> Tensor:
        """Give the lifted entries their own values again, in the balance and in what was selected, which it returns."""
        if not self._at.numel():
            return values
        selected = selected.to(torch.int64)
        self._balance.index_copy_(0, selected, values)
        self._balance.index_copy_(0, self._at, self._own)
        values = self._balance.index_select(0, selected)
        self._balance.index_fill_(0, selected, 0)
        return values
