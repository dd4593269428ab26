"""Gossip in step, for runs that can be had again bit for bit: flags are gathered, pairs drawn from (seed, step)."""

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.exchange import asks_of, matching
from laconic.gossip.messages import refusal
from laconic.gossip.replica import Replica
from laconic.gossip.topic import Topic
from laconic.transport import Collectives

_NOTHING = torch.empty(0, dtype=torch.uint8)


class Matched:
    """One worker's side; every worker calls each method at the same time."""

    def __init__(self, transport: Collectives, replica: Replica) -> None:
        self.transport = transport
        self.traffic = transport.traffic
        self.asked = self.answered = self.refused = self.late = 0
        self.lost: dict[int, str] = {}
        self._replica = replica
        self._vector = replica.vector
        self._messages = replica.messages

    def step(self, step: int, lr: float) -> None:
        """x += (x_peer - x)/2 for what one of a pair wants to exchange."""
        transport = self.transport
        pattern = self._replica.pattern
        wanted = self._replica.tracker.wants(step, lr, patiently=True)
        flags = torch.zeros(len(self._vector.groups), dtype=torch.uint8)
        flags[torch.tensor(wanted, dtype=torch.int64)] = 1
        everyone = transport.all_gather(flags.to(self._vector.device), "flags").cpu()
        partner = matching(pattern.peers, pattern.seed, step, transport.num_workers)[transport.rank]
        groups = torch.nonzero(everyone[transport.rank] | everyone[partner]).view(-1).tolist()
        if partner == transport.rank or not groups:
            for _ in ("question", "answer"):
                self._swap(_NOTHING, transport.rank, 0)
            return
        asks = asks_of(pattern.seed, step, transport.rank, partner)
        topic, way = self._ask(groups, partner) if asks else self._answer(groups, partner)
        self._replica.tracker.note_sent_(topic.num_entries)
        self._replica.move_(topic.spread(way), groups)
        self.asked += asks
        self.answered += not asks

    def _ask(self, groups: list[int], partner: int) -> tuple[Topic, Tensor]:
        """(what it was about, the way to the middle)."""
        about = self._messages.about(groups)
        values = about.read()
        if not kernels.all_finite(values):
            self._swap(refusal(self._messages.question_bytes(groups)), partner, 0)
            self._swap(_NOTHING, partner, self._messages.answer_bytes(groups))
            raise FrameError(f"the model of rank {self.transport.rank} is not finite")
        question = self._messages.ask_(about, values)
        self._swap(question.message, partner, 0)
        reply = self._swap(_NOTHING, partner, self._messages.answer_bytes(groups))
        return question.topic, self._messages.settle_(question, reply, partner)

    def _answer(self, groups: list[int], partner: int) -> tuple[Topic, Tensor]:
        """The same at the other end."""
        message = self._swap(_NOTHING, partner, self._messages.question_bytes(groups))
        try:
            topic, told = self._messages.open(message, partner)
        except FrameError as error:
            self._swap(refusal(self._messages.answer_bytes(groups)), partner, 0)
            raise FrameError(f"rank {partner} sent no question that can be answered: {error}") from None
        reply, way = self._messages.reply_(topic, told, topic.read())
        self._swap(reply, partner, 0)
        if way is None:
            raise FrameError(f"the model of rank {self.transport.rank} is not finite")
        return topic, way

    def _swap(self, message: Tensor, partner: int, num_back: int) -> Tensor:
        return self.transport.swap(message.to(self._vector.device), partner, "model", num_back).cpu()

    def settle(self) -> None:
        """Nothing is ever under way between two steps."""

    def mean(self, mine: Tensor, kind: str | None) -> Tensor:
        """The mean over all workers."""
        total = mine.to(self._vector.device, copy=True)
        if kind is None:
            before = self.traffic.copy()
        self.transport.all_reduce_(total, kind or "measured")
        if kind is None:
            self.traffic.by_kind = before
        return total.to(mine.device) / self.transport.num_workers

    def gather(self, mine: Tensor) -> Tensor:
        """Everyone's, in rank order; not counted."""
        before = self.traffic.copy()
        gathered = self.transport.all_gather(mine.to(self._vector.device), "measured").to(mine.device)
        self.traffic.by_kind = before
        return gathered

    @property
    def owed(self) -> Tensor | None:
        return None

    def owe(self, owed: Tensor | None) -> None:
        """Nothing is ever owed between two steps."""

    def close(self) -> None:
        """The transport belongs to whoever made it."""
