"""How the workers of a server come to their choices: each for itself, by a score of what all heard, or led by one."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.layout import positions_of
from laconic.memory import Due, Ledger
from laconic.paths.clock import PhaseClock
from laconic.paths.frame_plan import FramePlan, FramePlans
from laconic.paths.history import Boost, History, HistoryKeeper
from laconic.paths.path import Message, Work
from laconic.quantize import Marks
from laconic.select import Overlap
from laconic.transport import Transport
from laconic.wire import FrameShape

Choosing = Generator[Message, Any, tuple[Tensor, Tensor]]  # (chosen positions, fixed and chosen values)


class OwnChoice:
    """Every worker chooses for itself, and needs nothing to remember."""

    def __init__(self, plans: FramePlans, clock: PhaseClock) -> None:
        self._plans = plans
        self._clock = clock

    def take_(self, work: Work) -> Choosing:
        """Deposit the gradient, which is finite, and take out what is to be said."""
        yield from ()  # nothing to ask
        with self._clock.time("select", work.device):
            return self._withdraw_(work, self._plans.of(work), work.account.due_(work.flat, 1 / work.scale))

    def skip(self, work: Work) -> Generator[Message, Any, None]:
        """Take part in whatever the others do to choose, with nothing finite to choose from."""
        yield from ()

    def _withdraw_(self, work: Work, plan: FramePlan, due: Due) -> tuple[Tensor, Tensor]:
        return plan.withdraw_(work.account.balance, due)

    def kept(self, work: Work) -> Sequence[Tensor]:
        """What it remembers of a bucket."""
        return ()

    def restored(self) -> None:
        """What `kept` told of has been overwritten."""

    def heard_(self, work: Work, chosen: Tensor, union: Tensor, aggregate: Tensor) -> None:
        """Learn from an answer: the entries in it that are chosen among, and its values there."""

    def ages(self, step: int, ledger: Ledger[Any]) -> dict[str, Any]:
        """How long entries wait, where that is known."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""


class ScoredChoice(OwnChoice):
    """The largest scores, which the past pulls together; a few entries go in turn, whatever their score."""

    def __init__(self, plans: FramePlans, clock: PhaseClock, select: Overlap) -> None:
        super().__init__(plans, clock)
        self._select = select
        self._histories = Ledger(HistoryKeeper())

    def _history(self, work: Work) -> History:
        return self._histories.open(work.layout, work.device)

    def _withdraw_(self, work: Work, plan: FramePlan, due: Due) -> tuple[Tensor, Tensor]:
        """Take out the entries whose turn it is, then those with the largest scores.

        What was swept just now is not chosen again, unless as a zero.
        """
        balance = work.account.balance
        turn = self._select.swept(work.layout, work.density, work.step, work.number, work.device)
        owed = due.at(turn)
        swept = balance.index_select(0, turn).add_(owed)
        balance.index_copy_(0, turn, -owed)  # the addition leaves zeros, which have no score and are not chosen
        boost = Boost(self._select, plan.plan, self._history(work), balance, due)
        chosen, values = plan.withdraw_(balance, due)
        whole, values = values.tensor_split([plan.num_fixed])
        values = boost.take_back_(chosen, values)
        chosen, order = torch.cat([turn.to(torch.int32), chosen]).sort()
        return chosen, torch.cat([whole, torch.cat([swept, values]).index_select(0, order)])

    def kept(self, work: Work) -> Sequence[Tensor]:
        return self._history(work).kept

    def restored(self) -> None:
        for history in self._histories.opened.values():
            history.restored()

    def heard_(self, work: Work, chosen: Tensor, union: Tensor, aggregate: Tensor) -> None:
        history = self._history(work)
        history.note_(self._select.scored, union.to(work.device), aggregate.to(work.device))
        history.sent_(chosen, work.step)

    def ages(self, step: int, ledger: Ledger[Any]) -> dict[str, Any]:
        """Steps for which what is owed longest has waited, and the share of entries that were never sent."""
        oldest = num_never = num_entries = 0
        for layout, history in self._histories.opened.items():
            device = history.past.device
            fixed = {span.name for span in self._select.plan(layout, self._select.density).fixed}
            free = positions_of([span for span in layout.spans if span.name not in fixed], device)
            sent_at = history.sent_at[free]
            owed = ledger.open(layout, device).balance[free] != 0
            num_entries += free.numel()
            num_never += int((sent_at == 0).sum())
            if bool(owed.any()):
                oldest = max(oldest, step - int(sent_at[owed].min()))
        return {"oldest_residual": oldest, "never_sent": num_never / max(1, num_entries)}

    def state_dict(self) -> dict[str, Any]:
        return self._histories.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._histories.load_state_dict(dict(saved))


class LedChoice(ScoredChoice):
    """Everyone takes what worker (step mod M) would choose for itself; where it cannot say, each chooses."""

    def __init__(self, plans: FramePlans, clock: PhaseClock, select: Overlap, transport: Transport) -> None:
        super().__init__(plans, clock, select)
        self._transport = transport

    def take_(self, work: Work) -> Choosing:
        plan = self._plans.of(work)
        due = work.account.due_(work.flat, 1 / work.scale)
        balance = work.account.balance
        if self._transport.rank == self._leader(work):
            with self._clock.time("select", work.device):
                chosen, values = plan.withdraw_(balance, due)
            yield from self._follow(work, chosen[values[plan.num_fixed :] != 0])
            return chosen, values
        told = yield from self._follow(work, None)
        with self._clock.time("select", work.device):
            return plan.withdraw_(balance, due) if told is None else (told, plan.withdraw_at_(balance, due, told))

    def skip(self, work: Work) -> Generator[Message, Any, None]:
        yield from self._follow(work, None)

    def _leader(self, work: Work) -> int:
        return work.step % self._transport.num_workers

    def _follow(self, work: Work, mine: Tensor | None) -> Generator[Message, Any, Tensor | None]:
        """What the leader chose; `mine` where that is this worker, None where the leader overflowed."""
        num_entries = work.layout.num_entries
        leader = self._leader(work)
        frame = None
        if mine is not None:
            codes, scale = Marks().encode(torch.empty(0, device=self._transport.wire or mine.device))
            shape = FrameShape(num_entries, mine.numel(), 0, Marks())
            frame = shape.write_smallest(mine.to(codes.device), codes, scale, **work.frame_id)
        heard = yield partial(self._transport.broadcast, frame, leader)
        if not heard.numel():
            return None
        shape = FrameShape.of(heard, num_entries, [Marks()], peer=leader)
        return shape.read(heard, **work.frame_id, peer=leader).positions.to(work.device)
