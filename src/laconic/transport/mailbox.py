"""Point to point, without a barrier: one worker asks another, who answers while it trains on."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from laconic.transport.connection import HEAD_BYTES
from laconic.transport.traffic import Traffic

Reply = Callable[[int, int, Tensor, int], Tensor]  # (who asks, at which turn, what it says, bytes it awaits) -> those
OnAnswered = Callable[[int, int], object]  # (who asked, at which turn)
Combine = Callable[[list[Tensor]], Tensor]

QUESTION_HEAD_BYTES = HEAD_BYTES  # before a question: what it is, its turn, its length and that of the answer


def nobody_is_told(peer: int, turn: int) -> None:
    """Of an answer that has left."""


class Mailbox(Protocol):
    """One worker's end of a network on which any worker may ask any other at any time."""

    rank: int
    num_workers: int
    traffic: Traffic

    def listen(self, reply: Reply, answered: OnAnswered = nobody_is_told) -> None:
        """Answer whoever asks from now on, in threads of the mailbox's own; `answered` hears of each that has left."""

    def ask(self, peer: int, turn: int, said: Tensor, num_bytes: int) -> Tensor:
        """The `num_bytes` that `peer` answers; PeerError if it has died or hangs. A slow peer is waited for."""

    def combine_all(self, mine: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """combine(the tensors of all that are alive, in rank order), equal on each; uncounted if it has no kind."""

    def close(self) -> None:
        """Say no more."""
