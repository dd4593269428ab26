"""Push and pull of choices that have something in common: by a score of what all heard, or led by one worker."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.exchange import Shares
from laconic.kernels import merged
from laconic.layout import Layout, positions_of
from laconic.memory import Due, Ledger
from laconic.paths.frame_plan import FramePlan
from laconic.paths.history import Boost, History, HistoryKeeper
from laconic.paths.path import Message, Work
from laconic.paths.push_pull import Choosing, PushPull
from laconic.quantize import Marks
from laconic.select import Overlap
from laconic.wire import FrameShape, longest_frame


@dataclass
class ScoredPushPull(PushPull):
    """The largest scores, which the past pulls together; a few entries go in turn, whatever their score."""

    select: Overlap

    def __post_init__(self) -> None:
        super().__post_init__()
        self._histories = Ledger(HistoryKeeper())
        self._swept: dict[Layout, Tensor] = {}  # entries whose turn it is, on the host

    def _history(self, work: Work) -> History:
        history = self._histories.open(work.layout, work.device)
        if self.replays and not history.room and work.device.type == "cuda":
            shares = Shares(work.layout, self.transport.num_shares).layouts
            history.room = sum(max(1, round((self.server.down_rho or 1.0) * own.num_entries)) for own in shares)
        return history

    def prepare_(self, work: Work) -> None:
        turn = self.select.swept(work.layout, work.density, work.step, work.number)
        if work.layout not in self._swept or self._swept[work.layout].shape != turn.shape:
            self._swept[work.layout] = torch.empty_like(turn, pin_memory=work.device.type == "cuda")
        self._swept[work.layout].copy_(turn)

    def looked_at(self, work: Work) -> Sequence[Tensor]:
        return *self._history(work).told, self._swept[work.layout]

    def withdraw_(self, work: Work, plan: FramePlan, due: Due) -> tuple[Tensor, Tensor]:
        """Take out the entries whose turn it is, then those with the largest scores.

        What was swept just now is not chosen again, unless as a zero.
        """
        balance = work.account.balance
        turn = self._swept[work.layout].to(work.device, non_blocking=True)
        owed = due.at(turn)
        swept = balance.index_select(0, turn).add_(owed)
        balance.index_copy_(0, turn, -owed)  # the addition leaves zeros, which have no score and are not chosen
        boost = Boost(self.select, plan.plan, self._history(work), balance, due)
        chosen, values = plan.withdraw_(balance, due)
        whole, values = values.tensor_split([plan.num_fixed])
        values = boost.take_back_(chosen, values)
        chosen, values = merged(turn.to(torch.int32), swept, chosen, values)
        return chosen, torch.cat([whole, values])

    def kept(self, work: Work) -> Sequence[Tensor]:
        return self._history(work).kept

    def restored(self) -> None:
        for history in self._histories.opened.values():
            history.restored()

    def heard_(self, work: Work, chosen: Tensor, union: Tensor, aggregate: Tensor) -> None:
        history = self._history(work)
        history.note_(self.select.scored, union, aggregate)
        history.sent_(chosen, work.step)

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


class LedPushPull(ScoredPushPull):
    """Everyone takes what worker (step mod M) would choose for itself; where it cannot say, each chooses."""

    @property
    def turns(self) -> Sequence[int]:
        """The leader's choice, then parts and answers."""
        return (0, *(1 + turn for turn in super().turns))

    def looks_itself(self, work: Work) -> bool:
        return False  # it asks the leader

    def take_(self, work: Work) -> Choosing:
        if not work.finite:  # the others wait for the leader, and the leader for nobody
            yield from self._follow(work, None)
            return None
        plan = self.plans.of(work)
        due = work.account.due_(work.flat, 1 / work.scale)
        balance = work.account.balance
        if self.transport.rank == self._leader(work):
            with self.clock.time("select", work.device):
                chosen, values = plan.withdraw_(balance, due)
            yield from self._follow(work, chosen[values[plan.num_fixed :] != 0])
            return chosen, values
        told = yield from self._follow(work, None)
        with self.clock.time("select", work.device):
            return plan.withdraw_(balance, due) if told is None else (told, plan.withdraw_at_(balance, due, told))

    def _leader(self, work: Work) -> int:
        return work.step % self.transport.num_workers

    def _follow(self, work: Work, mine: Tensor | None) -> Generator[Message, Any, Tensor | None]:
        """What the leader chose; `mine` where that is this worker, None where the leader overflowed."""
        num_entries = work.layout.num_entries
        leader = self._leader(work)
        frame = None
        if mine is not None:
            codes, scale = Marks().encode(torch.empty(0, device=self.transport.wire or mine.device))
            shape = FrameShape(num_entries, mine.numel(), 0, Marks())
            frame = shape.write_smallest(mine.to(codes.device), codes, scale, **work.frame_id)
        heard = yield partial(self.transport.broadcast, frame, leader, longest_frame(num_entries, [Marks()]))
        if not heard.numel():
            return None
        shape = FrameShape.of(heard, num_entries, [Marks()], peer=leader)
        return shape.read(heard, **work.frame_id, peer=leader).positions.to(work.device)
