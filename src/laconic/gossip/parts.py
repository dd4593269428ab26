"""What a worker gossips with, whichever way it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from laconic.exchange import Gossip
from laconic.gossip.momentum import Momentum
from laconic.gossip.unsaid import Unsaid
from laconic.gossip.vector import ModelVector, Topic
from laconic.gossip.watch import Watch


class Correspondence(Protocol):
    """How two workers write to each other; what a letter is besides its message is its writer's own affair."""

    def ask(self, topic: Topic, values: Tensor) -> Any:
        """A question, with a `message` that goes out: this worker's values of what it is about."""

    def question_bytes(self, topic: Topic) -> int:
        """The length of a question."""

    def answer_bytes(self, topic: Topic) -> int:
        """The length of an answer."""

    def open(self, message: Tensor, peer: int) -> tuple[Topic, Any]:
        """What a question is about, and what it says; FrameError, which names the peer, if nothing may be applied."""

    def reply(self, question: Any, topic: Topic, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(an answer, the way to the middle from `values`); the answer says so, and no way, if those are not finite."""

    def settle(self, topic: Topic, mine: Any, reply: Tensor, peer: int) -> Tensor:
        """The way to the middle from the values that were told, after an answer; FrameError as above."""


class Parts(NamedTuple):
    """One worker's."""

    pattern: Gossip
    vector: ModelVector
    letters: Correspondence
    watch: Watch
    unsaid: Unsaid | None  # where only chosen entries go
    momentum: Momentum | None  # where it heeds what peers do

    def move_(self, way: Tensor, groups: Sequence[int]) -> None:
        """Add a vector that exchanges of these groups have brought to the model, and tell momentum and watch of it."""
        moved = self.vector.add_(way, groups)
        if self.momentum is not None:
            self.momentum.heed_(moved, self.watch.gap(groups), self.watch.lr_share)
        self.watch.exchanged(groups, None if self.unsaid is None else self.unsaid.last)
