"""Mailboxes of virtual workers in one process: for tests of what delays may not change, and for teaching."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from laconic.errors import PeerError
from laconic.transport.mailbox import QUESTION_HEAD_BYTES, Answer, Combine
from laconic.transport.traffic import Traffic


class _Hall:
    """Where virtual workers find each other."""

    def __init__(self, num_workers: int) -> None:
        self.answers: list[Answer | None] = [None] * num_workers
        self.boxes: list[LocalMailbox] = []
        self.laid: list[Tensor | None] = [None] * num_workers
        self.barrier = threading.Barrier(num_workers)


class LocalMailbox:
    """One virtual worker's end; `delay` runs before a message arrives and before its answer does."""

    def __init__(self, rank: int, hall: _Hall, delay: Callable[[], None]) -> None:
        self.rank, self.num_workers = rank, len(hall.answers)
        self.traffic = Traffic()
        self._hall, self._delay = hall, delay
        self._counting = threading.Lock()

    def serve(self, answer: Answer) -> None:
        self._hall.answers[self.rank] = answer

    def ask(self, peer: int, turn: int, said: Tensor, num_bytes: int) -> Tensor:
        self._delay()
        answer = self._hall.answers[peer]
        if answer is None:
            raise PeerError(f"rank {peer} is gone (it was closed)")
        reply = answer(self.rank, turn, said.clone(), num_bytes)
        self._hall.boxes[peer].count(reply.nbytes, QUESTION_HEAD_BYTES + said.nbytes)
        self._delay()
        self.count(QUESTION_HEAD_BYTES + said.nbytes, reply.nbytes)
        return reply.clone()

    def meet(self, mine: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """A call that all make, the closed ones too."""
        self._hall.laid[self.rank] = mine
        self._hall.barrier.wait()
        result = combine([laid for laid in self._hall.laid if laid is not None])
        self._hall.barrier.wait()
        return result

    def close(self) -> None:
        self._hall.answers[self.rank] = None

    def count(self, bytes_out: int, bytes_in: int) -> None:
        """Note one message each way."""
        with self._counting:
            self.traffic.count("model", bytes_out, bytes_out, bytes_in)


def local_mailboxes(num_workers: int, delay: Callable[[], None] = lambda: None) -> list[LocalMailbox]:
    """One mailbox for each of `num_workers` virtual workers."""
    hall = _Hall(num_workers)
    hall.boxes = [LocalMailbox(rank, hall, delay) for rank in range(num_workers)]
    return hall.boxes
