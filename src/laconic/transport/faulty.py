"""Networks that fail on purpose: messages lost, delayed, cut short, damaged or repeated, and a worker that dies."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import torch
from torch import Tensor

from laconic.errors import PeerError
from laconic.transport.mailbox import Combine, Mailbox, OnAnswered, Reply
from laconic.transport.transport import Collectives, Push


class Fault(Enum):
    """A fault of one message."""

    DROP = auto()  # nothing of it arrives; of a length that all know, zeros do
    DELAY = auto()
    TRUNCATE = auto()  # its first half arrives
    DUPLICATE = auto()  # it arrives again, in place of the next one
    DAMAGE = auto()  # with a bit of it flipped
    DIE = auto()  # its sender sends nothing any more


class WorkerDiedError(RuntimeError):
    """This worker was to die here; no error of the library, so that nothing takes it for a peer's death."""


@dataclass
class Faults:
    """The faults of a worker's messages: by number, from 0 in the order in which they leave it."""

    by_number: Mapping[int, Fault]
    delay_s: float = 0.0
    sleep: Callable[[float], None] = time.sleep
    num_messages: int = 0
    _last: list[Tensor] = field(default_factory=list)  # which arrives again
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self) -> Fault | None:
        """The fault of the next message, if it has one."""
        with self._lock:
            number = self.num_messages
            self.num_messages += 1
        fault = self.by_number.get(number)
        if fault == Fault.DELAY:
            self.sleep(self.delay_s)
        if any(number >= at for at, each in self.by_number.items() if each == Fault.DIE):
            raise WorkerDiedError(f"message {number} is not sent: this worker was to die")
        return fault

    def arriving(self, frames: Sequence[Tensor]) -> list[Tensor]:
        """The part that arrives of these flat frames, which are one message."""
        fault = self.next_fault()
        last = self._last
        self._last = [frame.clone() for frame in frames] if fault == Fault.DUPLICATE else []
        if fault == Fault.DROP:
            return [frame[:0] for frame in frames]
        if fault == Fault.TRUNCATE:
            return [frame[: frame.numel() // 2] for frame in frames]
        if fault == Fault.DAMAGE:
            return [_damaged(frame) for frame in frames]
        return last if len(last) == len(frames) else list(frames)

    def filled(self, frame: Tensor) -> Tensor:
        """The same of a length that all know: zeros stand for what does not arrive."""
        (arrived,) = self.arriving([frame.reshape(-1)])
        whole = torch.zeros_like(frame).view(-1)
        length = min(arrived.numel(), whole.numel())
        whole[:length] = arrived[:length]
        return whole.view(frame.shape)


def _damaged(frame: Tensor) -> Tensor:
    damaged = frame.clone()
    if frame.numel():
        damaged.view(torch.uint8)[frame.nbytes // 2] ^= 1
    return damaged


class FaultyCollectives(Collectives):
    """One worker's end of a network without servers, of which some calls go wrong; a call is one message.

    A worker that only receives a broadcast sends nothing, and what owners answer arrives.
    """

    def __init__(self, inner: Collectives, faults: Faults) -> None:
        self.rank = inner.rank
        self.num_workers = inner.num_workers
        self.num_shares = inner.num_shares
        self.owned_share = inner.owned_share
        self.wire = inner.wire
        self.traffic = inner.traffic
        self.faults = faults
        self._inner = inner

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        tensor.copy_(self.faults.filled(tensor))
        self._inner.all_reduce_(tensor, kind)

    def sum_gradients_(self, tensor: Tensor, kind: str) -> None:
        tensor.copy_(self.faults.filled(tensor))
        self._inner.sum_gradients_(tensor, kind)

    def broadcast(self, frame: Tensor | None, speaker: int, longest: int) -> Tensor:
        if frame is not None and self.rank == speaker:
            (frame,) = self.faults.arriving([frame])
        return self._inner.broadcast(frame, speaker, longest)

    def push(self, push: Push) -> dict[int, Tensor]:
        arriving = zip(self.faults.arriving(push.parts), push.longest, strict=True)
        return self._inner.push(replace(push, parts=[part[:longest] for part, longest in arriving]))

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        return self._inner.pull(push, own)

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        return self._inner.all_gather(self.faults.filled(frame), kind)

    def gather_small(self, card: Tensor) -> Tensor:
        return self._inner.gather_small(card)

    def all_to_all(self, rows: Tensor, kind: str) -> Tensor:
        return self._inner.all_to_all(self.faults.filled(rows), kind)

    def sendrecv(self, frame: Tensor, peer: int, kind: str, num_back: int) -> Tensor:
        return self._inner.sendrecv(self.faults.filled(frame), peer, kind, num_back)

    def shut_down(self) -> None:
        self._inner.shut_down()

    def close(self) -> None:
        self._inner.close()


class FaultyMailbox:
    """One worker's mailbox: `requests` befall what it asks and gives to combine, `replies` what it answers.

    A request that is lost takes its connection with it, so its sender finds that the peer is gone. One that arrives
    twice is answered twice, and its second answer is the one that counts. A worker that dies closes its mailbox.
    """

    def __init__(self, inner: Mailbox, requests: Faults, replies: Faults) -> None:
        self.rank = inner.rank
        self.num_workers = inner.num_workers
        self.traffic = inner.traffic
        self._inner = inner
        self._requests = requests
        self._replies = replies

    def listen(self, reply: Reply, answered: OnAnswered = lambda peer, turn: None) -> None:
        def faulty(peer: int, turn: int, request: Tensor, num_bytes: int) -> Tensor:
            return self._replies.filled(reply(peer, turn, request, num_bytes))

        self._inner.listen(faulty, answered)

    def ask(self, peer: int, turn: int, request: Tensor, num_bytes: int) -> Tensor:
        with self._closed_at_death():
            fault = self._requests.next_fault()
        if fault == Fault.DROP:
            raise PeerError(f"rank {peer} is gone (a request was lost)")
        if fault == Fault.DUPLICATE:
            self._inner.ask(peer, turn, request, num_bytes)
        if fault == Fault.TRUNCATE:
            request = request[: request.numel() // 2]
        if fault == Fault.DAMAGE:
            request = _damaged(request)
        return self._inner.ask(peer, turn, request, num_bytes)

    def combine_all(self, own: Tensor, combine: Combine, kind: str | None) -> Tensor:
        with self._closed_at_death():
            own = self._requests.filled(own)
        return self._inner.combine_all(own, combine, kind)

    def close(self) -> None:
        self._inner.close()

    @contextmanager
    def _closed_at_death(self) -> Iterator[None]:
        try:
            yield
        except WorkerDiedError:
            self._inner.close()
            raise
