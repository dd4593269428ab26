"""M virtual workers in one process, each in a thread of its own: for tests, teaching and large M."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.transport.traffic import Traffic
from laconic.transport.transport import Collectives, Push

T = TypeVar("T")


class _Meeting:
    """The place where virtual workers show each other what they send."""

    def __init__(self, num_workers: int) -> None:
        self.shown: list[Any] = [None] * num_workers
        self.barrier = threading.Barrier(num_workers)


class InProcess(Collectives):
    """One virtual worker's end; counts what the same call over a ring of processes would move."""

    wire = None
    was_late = False

    def __init__(self, rank: int, meeting: _Meeting, num_servers: int) -> None:
        self.rank = rank
        self.num_workers = len(meeting.shown)
        self.num_shares = num_servers or self.num_workers
        self.owned_share = rank if rank < self.num_shares else None
        self.traffic = Traffic()
        self._meeting = meeting
        self._served = num_servers > 0

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        self.traffic.count_all_reduce(kind, tensor.nbytes, self.num_workers)
        tensor.copy_(self._exchange(tensor, partial(reduce, torch.add)))

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        self.traffic.count_all_gather(kind, frame.nbytes, self.num_workers)
        return self._exchange(frame, torch.stack)

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        self.traffic.count_all_to_all(kind, rows.nbytes, self.num_workers)
        return self._exchange(rows, lambda shown: torch.stack([theirs[self.rank] for theirs in shown]))

    def broadcast(self, frame: Tensor | None, speaker: int, longest: int) -> Tensor:
        own = torch.empty(0, dtype=torch.uint8) if frame is None else frame
        received: Tensor = self._exchange(own, lambda shown: shown[speaker].clone())
        self.traffic.count_broadcast(received.numel(), self.num_workers, sends=self.rank == speaker)
        return received

    def push(self, push: Push) -> dict[int, Tensor]:
        share = self.owned_share
        received: list[Tensor] = self._exchange(
            push.parts, lambda shown: [] if share is None else [parts[share] for parts in shown]
        )
        sent = [part.numel() for part in push.parts]
        assert all(length <= most for length, most in zip(sent, push.longest, strict=True))
        if self._served:
            self.traffic.count("up", sum(sent), sum(sent), 0)
        else:
            self.traffic.count_push(self.rank, sent, [part.numel() for part in received])
        return dict(enumerate(received))

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        answers = self._exchange(own, lambda shown: shown[: self.num_shares])
        lengths = [each.numel() for each in answers]
        assert all(length <= most for length, most in zip(lengths, push.longest, strict=True))
        if self._served:
            self.traffic.count("down", 0, 0, sum(lengths))
        else:
            self.traffic.count_pull(self.rank, lengths)
        return answers

    def sendrecv(self, frame: Tensor, peer: int, kind: str, num_back: int) -> Tensor:
        """Unlike over processes, a call that all workers make at once, those without a peer with themselves."""
        if peer != self.rank:
            self.traffic.count(kind, frame.nbytes, frame.nbytes, frame.element_size() * num_back)
        theirs: Tensor = self._exchange(frame, lambda shown: shown[peer].clone())
        assert theirs.numel() == num_back, "over a network this would hang"
        return theirs

    def _exchange(self, own: object, read: Callable[[list[Any]], T]) -> T:
        """The result of `read` on that which all show, by rank; nobody overwrites it while another still reads."""
        self._meeting.shown[self.rank] = own
        self._meeting.barrier.wait()
        result = read(self._meeting.shown)
        self._meeting.barrier.wait()
        return result


def silent_end(num_workers: int, *, num_servers: int = 0) -> InProcess:
    """One of M workers' ends of a network that carries nothing: to predict what would be sent on it."""
    return InProcess(0, _Meeting(num_workers), num_servers)


def in_process(num_workers: int, work: Callable[[InProcess], T], *, num_servers: int = 0) -> list[T]:
    """Run `work` once per virtual worker and return the results in rank order; the first failure ends them all.

    With `num_servers` the first workers lend their threads to as many dedicated servers, whose traffic is not
    counted as theirs; without, each worker owns a share.
    """
    meeting = _Meeting(num_workers)

    def run(rank: int) -> T:
        try:
            return work(InProcess(rank, meeting, num_servers))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_workers)]
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error  # the cause, not what it did to the others
    return [future.result() for future in futures]
