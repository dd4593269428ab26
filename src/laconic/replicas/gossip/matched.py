"""Gossip in step, for runs that can be had again bit for bit: flags are gathered, pairs drawn from (seed, step)."""

from contextlib import nullcontext

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.exchange import asks_of, matching
from laconic.replicas.gossip.messages import refusal
from laconic.replicas.gossip.side import Side
from laconic.replicas.gossip.vector import Topic
from laconic.transport import Collectives

_NOTHING = torch.empty(0, dtype=torch.uint8)


class Matched(Side):
    """One worker's side; every worker calls each method at the same time."""

    end: Collectives

    def step(self, step: int, lr: float) -> None:
        """x += (x_peer - x)/2 for what one of a pair wants to exchange."""
        rank = self.end.rank
        pattern = self.pattern
        wanted = self.tracker.wants(step, lr, patiently=True)
        flags = torch.zeros(len(self.vector.groups), dtype=torch.uint8)
        flags[torch.tensor(wanted, dtype=torch.int64)] = 1
        everyone = self.end.all_gather(flags.to(self.vector.device), "flags").cpu()
        partner = matching(pattern.peers, pattern.seed, step, self.end.num_workers)[rank]
        groups = torch.nonzero(everyone[rank] | everyone[partner]).view(-1).tolist()
        if partner == rank or not groups:
            for _ in ("question", "answer"):
                self._swap(_NOTHING, rank, 0)
            return
        asks = asks_of(pattern.seed, step, rank, partner)
        topic, way = self._ask(groups, partner) if asks else self._answer(groups, partner)
        self.tracker.note_sent_(topic.num_entries)
        self._owed.add_(topic, way)
        self.move_()
        self.asked += asks
        self.answered += not asks

    def _ask(self, groups: list[int], partner: int) -> tuple[Topic, Tensor]:
        """(what it was about, the way to the middle)."""
        about = self.messages.about(groups)
        values = about.read()
        question = self.messages.ask_(about, values) if kernels.all_finite(values) else None
        message = question.message if question else refusal(self.messages.question_bytes(groups))
        self._swap(message, partner, 0)
        reply = self._swap(_NOTHING, partner, self.messages.answer_bytes(groups))
        if question is None:
            raise FrameError(f"the model of rank {self.end.rank} is not finite")
        return question.topic, self.messages.settle_(question, reply, partner)

    def _answer(self, groups: list[int], partner: int) -> tuple[Topic, Tensor]:
        """The same at the other end."""
        message = self._swap(_NOTHING, partner, self.messages.question_bytes(groups))
        try:
            topic, told = self.messages.open(message, partner)
        except FrameError as error:
            self._swap(refusal(self.messages.answer_bytes(groups)), partner, 0)
            raise FrameError(f"rank {partner} sent no question that can be answered: {error}") from None
        reply, way = self.messages.reply_(topic, told, topic.read())
        self._swap(reply, partner, 0)
        if way is None:
            raise FrameError(f"the model of rank {self.end.rank} is not finite")
        return topic, way

    def _swap(self, message: Tensor, partner: int, num_back: int) -> Tensor:
        return self.end.sendrecv(message.to(self.vector.device), partner, "model", num_back)

    def settle(self) -> None:
        """Nothing is ever under way between two steps."""

    def mean(self, mine: Tensor, kind: str | None) -> Tensor:
        """The mean over all workers."""
        total = mine.to(self.vector.device, copy=True)
        with nullcontext() if kind else self.end.traffic.uncounted():
            self.end.all_reduce_(total, kind or "measured")
        return total.to(mine.device) / self.end.num_workers

    def gather(self, mine: Tensor) -> Tensor:
        """Everyone's, in rank order; not counted."""
        with self.end.traffic.uncounted():
            return self.end.all_gather(mine.to(self.vector.device), "measured").to(mine.device)

    @property
    def owed(self) -> Tensor | None:
        return None

    def owe(self, owed: Tensor | None) -> None:
        """Nothing is ever owed between two steps."""

    def close(self) -> None:
        """The transport belongs to whoever made it."""
