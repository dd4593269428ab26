"""M virtual workers in one process, each in a thread of its own: for tests, teaching and large M."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from laconic.transport.traffic import Traffic
from laconic.transport.transport import Push

T = TypeVar("T")


class _Shared:
    """What virtual workers see of each other: each shows a tensor, all read, all go on."""

    def __init__(self, num_workers: int, num_servers: int) -> None:
        self.served = num_servers > 0
        self.parts: list[Sequence[Tensor]] = [()] * num_workers
        self.answers: list[Tensor] = [torch.empty(0)] * (num_servers or num_workers)
        self.shown: list[Tensor | None] = [None] * num_workers
        self.barrier = threading.Barrier(num_workers)


class InProcess:
    """One virtual worker's end; counts what the same call over a ring of processes would move."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.num_workers = len(shared.shown)
        self.num_living = self.num_workers
        self.num_shares = len(shared.answers)
        self.owned_share = rank if rank < self.num_shares else None
        self.wire: torch.device | None = None
        self.traffic = Traffic()
        self._shared = shared

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        self.traffic.count_all_reduce(kind, tensor.nbytes, self.num_workers)
        shown = self._show(tensor)
        total = shown[0].clone()
        for other in shown[1:]:  # in rank order, so every worker gets the same bits
            total += other
        self._shared.barrier.wait()  # nobody overwrites what another still reads
        tensor.copy_(total)

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        self.traffic.count_all_gather(kind, frame.nbytes, self.num_workers)
        gathered = torch.stack(self._show(frame))
        self._shared.barrier.wait()
        return gathered

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        self.traffic.count_all_to_all(kind, rows.nbytes, self.num_workers)
        mine = torch.stack([shown[self.rank] for shown in self._show(rows)])
        self._shared.barrier.wait()
        return mine

    def broadcast(self, frame: Tensor | None, speaker: int) -> Tensor:
        speaks = self.rank == speaker
        if speaks:
            self._shared.shown[speaker] = torch.empty(0, dtype=torch.uint8) if frame is None else frame
        self._shared.barrier.wait()
        said = self._shared.shown[speaker]
        assert said is not None
        self.traffic.count_broadcast(said.numel(), self.num_workers, speaks=speaks)
        self._shared.barrier.wait()
        return said.clone()

    def push_pull(self, push: Push) -> list[Tensor]:
        self._shared.parts[self.rank] = push.parts
        self._shared.barrier.wait()
        heard = [each[self.owned_share] for each in self._shared.parts] if self.owned_share is not None else []
        if self.owned_share is not None:
            assert push.answer is not None
            self._shared.answers[self.owned_share] = push.answer(enumerate(heard))
        self._shared.barrier.wait()
        answers = list(self._shared.answers)
        sent = [part.numel() for part in push.parts]
        lengths = [each.numel() for each in answers]
        assert all(max(up, down) <= most for up, down, most in zip(sent, lengths, push.longest, strict=True))
        if self._shared.served:
            self.traffic.count("up", sum(sent), sum(sent), 0)
            self.traffic.count("down", 0, 0, sum(lengths))
        else:
            self.traffic.count_push_pull(self.rank, sent, [part.numel() for part in heard], lengths)
        self._shared.barrier.wait()
        return answers

    def swap(self, frame: Tensor, peer: int, kind: str, num_back: int) -> Tensor:
        """Unlike over processes, a call that all workers make at once, those without a peer with themselves."""
        if peer != self.rank:
            self.traffic.count(kind, frame.nbytes, frame.nbytes, frame.element_size() * num_back)
        theirs = self._show(frame)[peer].clone()
        assert theirs.numel() == num_back, "over a network this would hang"
        self._shared.barrier.wait()
        return theirs

    def owner_states(self) -> list[bytes]:
        return []

    def load_owner_states(self, states: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass

    def _show(self, tensor: Tensor) -> list[Tensor]:
        self._shared.shown[self.rank] = tensor
        self._shared.barrier.wait()
        return [shown for shown in self._shared.shown if shown is not None]


def silent_end(num_workers: int, *, num_servers: int = 0) -> InProcess:
    """One of M workers' ends of a network on which nobody talks: to foretell what would be said on it."""
    return InProcess(0, _Shared(num_workers, num_servers))


def in_process(num_workers: int, work: Callable[[InProcess], T], *, num_servers: int = 0) -> list[T]:
    """Run `work` once per virtual worker and return the results in rank order; the first failure ends them all.

    With `num_servers` the first workers lend their threads to as many dedicated servers, whose talk is not counted as
    theirs; without, each worker owns a share.
    """
    shared = _Shared(num_workers, num_servers)

    def run(rank: int) -> T:
        try:
            return work(InProcess(rank, shared))
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_workers)]
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in failures:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error  # the cause, not what it did to the others
    return [future.result() for future in futures]
