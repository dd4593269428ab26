"""Push and pull of selections that have much in common, by a score of what all workers received before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.exchange import Shares
from laconic.kernels.host import merged
from laconic.layout import Layout, positions_of
from laconic.memory import Due, Ledger
from laconic.paths.frame_plan import FramePlan
from laconic.paths.history import Boost, History, HistoryKeeper
from laconic.paths.path import Work
from laconic.paths.push_pull import PushPull
from laconic.select import Overlap


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
