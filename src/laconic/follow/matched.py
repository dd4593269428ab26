"""Gossip in step, for runs that can be had again bit for bit: flags are gathered, pairs drawn from (seed, step)."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.exchange import Medium, matching
from laconic.follow.letter import Letters, check_finite
from laconic.follow.parts import Parts
from laconic.follow.remainders import Remainders, offset_of
from laconic.follow.unsaid import Unsaid
from laconic.follow.vector import Topic


class Matched:
    """One worker's side; every worker calls each method at the same time."""

    def __init__(self, medium: Medium, parts: Parts) -> None:
        self.medium = medium
        self.traffic = medium.traffic
        self.asked = self.answered = self.refused = self.late = 0
        self.lost: dict[int, str] = {}
        self._pattern, self._vector, self._letters, self._watch, self._unsaid = parts

    def step(self, step: int, lr: float) -> None:
        """x += (x_peer - x)/2 for the groups that one of a pair wants to exchange."""
        medium, pattern = self.medium, self._pattern
        wanted = self._watch.wants(step, lr, patiently=True)
        flags = torch.zeros(len(self._vector.groups), dtype=torch.uint8)
        flags[torch.tensor(wanted, dtype=torch.int64)] = 1
        everyone = medium.all_gather(flags.to(self._vector.device), "flags").cpu()
        partner = matching(pattern.peers, pattern.seed, step, medium.num_workers)[medium.rank]
        groups = torch.nonzero(everyone[medium.rank] | everyone[partner]).view(-1).tolist()
        nothing = flags[:0].to(self._vector.device)
        if partner == medium.rank or not groups:
            for _ in range(1 if self._unsaid is None and isinstance(self._letters, Letters) else 2):
                medium.swap(nothing, medium.rank, "model")
            return
        topic: Topic = groups if self._unsaid is None else self._agree(self._unsaid, partner)
        values = self._vector.read(topic)
        delta = self._way(topic, values, partner, step)
        self._vector.add_(delta, topic)
        self._watch.sent(self._vector.count(topic))
        if self._unsaid is not None and isinstance(topic, Tensor):
            self._unsaid.exchanged(topic, values + delta)
        self._watch.exchanged(groups, None if self._unsaid is None else self._unsaid.last)
        if wanted:
            self.asked += 1
        else:
            self.answered += 1

    def _way(self, topic: Topic, values: Tensor, partner: int, step: int) -> Tensor:
        """(x_peer - x)/2, as both tell it."""
        letters = self._letters
        if isinstance(letters, Remainders):
            # The wider of both steps, and an offset that both know.
            mine = letters.propose(check_finite(values))
            theirs = self._swap(mine.view(torch.uint8), partner).view(torch.int8)
            offset = offset_of(self._pattern.seed, step, min(self.medium.rank, partner))
            said = letters.write(values, torch.maximum(mine, theirs), offset)
            return letters.settle(topic, said, self._swap(said.message, partner), partner)
        assert isinstance(letters, Letters)
        letter = letters.answer(topic, values)
        return letters.settle(topic, letter, self._swap(letter.message, partner), partner)

    def _swap(self, message: Tensor, partner: int) -> Tensor:
        return self.medium.swap(message.to(self._vector.device), partner, "model").cpu()

    def _agree(self, unsaid: Unsaid, partner: int) -> Tensor:
        """The entries that have changed most on one of a pair, the same on both."""
        letters = self._letters
        assert isinstance(letters, Letters)
        mine, _ = unsaid.choose_(check_finite(self._vector.read()))
        theirs = letters.named(self._swap(letters.name(mine), partner))
        either = torch.zeros(self._vector.num_entries, dtype=torch.bool)
        either[mine] = either[theirs] = True
        return either.nonzero().view(-1)

    def settle(self) -> None:
        """Nothing is ever under way between two steps."""

    def mean(self, mine: Tensor, kind: str | None) -> Tensor:
        """The mean over all workers."""
        total = mine.to(self._vector.device, copy=True)
        if kind is None:
            before = self.traffic.copy()
        self.medium.all_reduce_(total, kind or "measured")
        if kind is None:
            self.traffic.by_kind = before
        return total.to(mine.device) / self.medium.num_workers

    def gather(self, mine: Tensor) -> Tensor:
        """Everyone's, in rank order; not counted."""
        before = self.traffic.copy()
        gathered = self.medium.all_gather(mine.to(self._vector.device), "measured").to(mine.device)
        self.traffic.by_kind = before
        return gathered

    @property
    def owed(self) -> Tensor | None:
        return None

    def owe(self, owed: Tensor | None) -> None:
        """Nothing is ever owed between two steps."""

    def close(self) -> None:
        """The medium belongs to whoever made it."""
