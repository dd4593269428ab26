"""Mailboxes of virtual workers in one process: for tests of what delays may not change."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from laconic.errors import PeerError
from laconic.transport.mailbox import REQUEST_HEAD_BYTES, Combine, OnAnswered, Reply
from laconic.transport.traffic import Traffic


class _Network:
    """Where virtual workers find each other."""

    def __init__(self, num_workers: int) -> None:
        self.replies: list[Reply | None] = [None] * num_workers
        self.boxes: list[LocalMailbox] = []
        self.given: list[Tensor | None] = [None] * num_workers
        self.barrier = threading.Barrier(num_workers)


class LocalMailbox:
    """One virtual worker's end; `delay` runs before a message arrives and before its answer does."""

    def __init__(self, rank: int, network: _Network, delay: Callable[[], None]) -> None:
        self.rank = rank
        self.num_workers = len(network.replies)
        self.traffic = Traffic()
        self._network = network
        self._delay = delay
        self._counting = threading.Lock()

    def listen(self, reply: Reply, answered: OnAnswered = lambda peer, turn: None) -> None:
        def answer(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
            told = reply(peer, turn, message, num_bytes)
            answered(peer, turn)
            return told

        self._network.replies[self.rank] = answer

    def ask(self, peer: int, turn: int, said: Tensor, num_bytes: int) -> Tensor:
        self._delay()
        reply = self._network.replies[peer]
        if reply is None:
            raise PeerError(f"rank {peer} is gone (it was closed)")
        told = reply(self.rank, turn, said.clone(), num_bytes)
        self._network.boxes[peer].count(told.nbytes, REQUEST_HEAD_BYTES + said.nbytes)
        self._delay()
        self.count(REQUEST_HEAD_BYTES + said.nbytes, told.nbytes)
        return told.clone()

    def combine_all(self, mine: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """A call that all make, the closed ones too."""
        self._network.given[self.rank] = mine
        self._network.barrier.wait()
        result = combine([given for given in self._network.given if given is not None])
        self._network.barrier.wait()
        return result

    def close(self) -> None:
        self._network.replies[self.rank] = None

    def count(self, bytes_out: int, bytes_in: int) -> None:
        """Note one message each way."""
        with self._counting:
            self.traffic.count("model", bytes_out, bytes_out, bytes_in)


def local_mailboxes(num_workers: int, delay: Callable[[], None] = lambda: None) -> list[LocalMailbox]:
    """One mailbox for each of `num_workers` virtual workers."""
    network = _Network(num_workers)
    network.boxes = [LocalMailbox(rank, network, delay) for rank in range(num_workers)]
    return network.boxes
