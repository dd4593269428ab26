"""A dedicated server's end: receives from every living worker, replies, and goes on without those that are gone."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from laconic.errors import FrameError, LaunchError
from laconic.transport import BESIDE, Acceptor, Flow, Kind, Message, Traffic, longest_message, move_some, payload_of

_LOG = logging.getLogger("laconic.server")
_JOIN_TIMEOUT_S = 300.0  # for all workers to come
_UNSENT_BYTES = 16_384  # of a reply that may wait in the kernel while the next worker's is begun
_PAUSE_S = 0.5  # without a byte taken, after which a reply lets the next one begin
_GOODBYE_S = 5.0  # for workers to receive what went wrong
_DROPPED_BYTES = 1 << 20  # of what workers still send then, at once
_LOOK_S = 0.005  # after which it is looked whether a reply is ready
_WITHOUT_PAYLOAD = (Kind.STATE, Kind.STATS, Kind.CLOSE)
_WITH_PAYLOAD = (Kind.LAYOUT, Kind.PARTS, Kind.SUM, Kind.TOTAL, Kind.AVERAGE, Kind.ECHO, Kind.LOAD)
_CLOSED_EARLY = (Kind.LAYOUT, Kind.PARTS, Kind.SUM, Kind.ECHO)  # rounds that need not wait for all
_LAST = (Kind.CLOSE, Kind.ERROR)
_MOST_MISSED = 16  # rounds of one worker, before all wait for it: so a slow one takes part now and then


class _ClosedRound(NamedTuple):
    """A round that was closed without a worker, and the reply that waits for its message."""

    about: Message
    reply: Message


@dataclass
class _Worker:
    """A worker as this server sees it; a record stays when the worker is lost."""

    flow: Flow
    lost: str = ""  # why it was left behind; empty while it lives
    num_late: int = 0  # its messages that came after their round was closed
    awaited_since: float = math.inf  # when the others began to wait for its message of this round
    reply_begun_at: float = 0.0  # when the last reply to it began to leave
    missed: deque[_ClosedRound] = field(default_factory=deque)

    @property
    def is_replied(self) -> bool:
        """Whether nothing is on its way to it."""
        return not self.flow.out.view


@dataclass
class Listener:
    """Connections to M workers; a round is one message of each of the living, all about the same thing.

    Replies leave while the next round comes in, one after the other, so that a worker that has its own goes on while
    others wait. A round of training is closed once `wait_budget_s` have passed since its first message. A worker whose
    message comes later gets the reply that the others had, marked as late.
    """

    num_workers: int
    timeout_s: float
    wait_budget_s: float = math.inf
    unit: str = "step"  # that workers exchange something for

    def __post_init__(self) -> None:
        self.traffic = Traffic()
        self.longest = longest_message()  # bytes of a message, until the workers have told what they train
        self._workers: dict[int, _Worker] = {}  # by rank, the lost ones too
        self._replies: deque[tuple[int, Message]] = deque()  # that have not begun to leave, each with its rank
        self._waits_for_all = False  # since a worker missed too many rounds
        self._num_steps = 0  # of which a round was whole
        self._acceptor = Acceptor(self.num_workers)
        self.address = self._acceptor.address

    @property
    def living(self) -> list[int]:
        """The ranks of the workers that are there, ascending."""
        return [rank for rank, worker in self._workers.items() if not worker.lost]

    @property
    def lost(self) -> dict[int, str]:
        """Why each worker was lost that was, by rank."""
        return {rank: worker.lost for rank, worker in self._workers.items() if worker.lost}

    @property
    def late(self) -> dict[int, int]:
        """How many messages came too late, by rank."""
        return {rank: worker.num_late for rank, worker in self._workers.items() if worker.num_late}

    @property
    def _flows(self) -> dict[int, Flow]:
        return {rank: worker.flow for rank, worker in self._workers.items() if not worker.lost}

    def accept(self) -> dict[int, str]:
        """Let all workers in; the terms of each."""
        accepted = self._acceptor.accept(range(self.num_workers), _JOIN_TIMEOUT_S)
        self._acceptor.close()
        if len(accepted) < self.num_workers:
            for connection, _ in accepted.values():
                connection.close()
            raise LaunchError(
                f"{len(accepted)} of {self.num_workers} workers came to this server; see the logs of the others"
            )
        for rank, (connection, _) in sorted(accepted.items()):
            connection.give_up_after(self.timeout_s)
            connection.limit_unsent(_UNSENT_BYTES)  # a worker that has its reply goes on while others wait for theirs
            connection.set_timeout(0)  # the listener waits for all of them at once
            self._workers[rank] = _Worker(Flow(connection))
        return {rank: terms for rank, (_, terms) in accepted.items()}

    def stop_accepting(self) -> None:
        """Let `accept` end, in another thread."""
        self._acceptor.stop()

    def receive_round(self, on_arrival: Callable[[int, Message], None]) -> dict[int, Message]:
        """The next round by rank, after `on_arrival` of each message; FrameError, on all workers too, if one differs.

        Workers may train for as long as they like. Once one of them waits, the others have `timeout_s` to come.
        """
        received = self._receive_all(on_arrival)
        if any(message.kind != Kind.CLOSE for message in received.values()):
            for rank in [rank for rank, message in received.items() if message.kind == Kind.CLOSE]:
                del received[rank]
                if not self._workers[rank].lost:  # before its last reply was through
                    self._lose(rank, ConnectionError())
        if received:
            usual = statistics.mode(message.id for message in received.values())
            about = next(message for message in received.values() if message.id == usual)
            for rank, message in received.items():
                if message.id != usual:
                    self._differs(rank, message, about)
            self._num_steps = max(self._num_steps, about.step + 1)
            bytes_in = sum(message.num_bytes for message in received.values())
            self.traffic.count(_counted("up", about.kind), 0, 0, bytes_in)
        return received

    def _receive_all(self, on_arrival: Callable[[int, Message], None]) -> dict[int, Message]:
        """A message of each of the living, by rank; a worker whose message is not whole in time is lost."""
        received: dict[int, Message] = {}
        first_at = math.inf  # when the first message came
        for rank in self.living:
            self._expect(rank)
        while missing := set(self.living) - received.keys():
            message = None
            for rank in sorted(missing):
                if message := self._workers[rank].flow.take():
                    break
            if message is None:
                closes_at = self._closes_at(first_at, received, missing)
                self._move(min([closes_at, *map(self._lost_at, missing)]))
                if time.monotonic() > closes_at:
                    break
                self._lose_slow(missing)
            elif not (worker := self._workers[rank]).missed:
                worker.awaited_since = math.inf
                received[rank] = message
                if message.kind != Kind.CLOSE and first_at == math.inf:  # a worker that is done waits for nobody
                    first_at = time.monotonic()
                    for other in set(self.living) - received.keys():
                        self._workers[other].awaited_since = min(self._workers[other].awaited_since, first_at)
                on_arrival(rank, message)
            elif message.kind == Kind.CLOSE:
                self._lose(rank, ConnectionError())
            else:
                self._reply_late(rank, message)
                self._expect(rank)
        return dict(sorted(received.items()))

    def _expect(self, rank: int) -> None:
        most = dict.fromkeys(_WITHOUT_PAYLOAD, 0) | dict.fromkeys(_WITH_PAYLOAD, self.longest)
        self._workers[rank].flow.expect(most)

    def _lost_at(self, rank: int) -> float:
        """When a worker is lost that is slow to take its reply, or that others wait for though it has its reply."""
        worker = self._workers[rank]
        since = worker.awaited_since
        if not worker.is_replied:
            since = worker.reply_begun_at
        elif any(rank == waiting for waiting, _ in self._replies):
            since = math.inf
        return since + self.timeout_s

    def _lose_slow(self, ranks: Collection[int]) -> None:
        now = time.monotonic()
        for rank in set(ranks) & set(self.living):
            worker = self._workers[rank]
            if now > self._lost_at(rank) and worker.flow.into.result is None:
                slow = "was slow to send" if worker.flow.has_moved else "was silent"
                self._lose(rank, TimeoutError(slow if worker.is_replied else "was slow to take a reply"))

    def _closes_at(self, first_at: float, received: Mapping[int, Message], missing: Collection[int]) -> float:
        """When the round is closed without the missing; all buckets of one step wait for them once."""
        about = next((message for message in received.values() if message.kind != Kind.CLOSE), None)
        if about is None or about.kind not in _CLOSED_EARLY or self._waits_for_all:
            return math.inf
        missed = [self._workers[rank].missed for rank in missing]
        same = about.step >= 0 and all(rounds and rounds[-1].about.step == about.step for rounds in missed)
        return first_at if same else first_at + self.wait_budget_s

    def reply(self, payloads: Mapping[int, Tensor] | Tensor, to: Message) -> None:
        """Reply to a round: the same to all, or to each its own; a worker that has not taken it in time is lost."""
        living = self.living
        about = Message(to.kind, to.step, to.bucket)
        bytes_out = 0
        for place, rank in enumerate(living):
            payload = payloads if isinstance(payloads, Tensor) else payloads[rank]
            reply = replace(about, payload=payload, living=len(living), place=place)
            worker = self._workers[rank]
            if worker.awaited_since < math.inf and to.kind != Kind.ERROR:
                worker.missed.append(_ClosedRound(about, replace(reply, kind=Kind.LATE)))
            else:
                self._replies.append((rank, reply))
                bytes_out += reply.num_bytes
        missed = [self._workers[rank].missed for rank in living]
        self._waits_for_all = any(missed) and (self._waits_for_all or self._missed_too_many(max(missed, key=len)))
        self.traffic.count(_counted("down", to.kind), 0, bytes_out, 0)
        if to.kind in _LAST:
            self._send(self.timeout_s)
        elif self.wait_budget_s < math.inf:  # a worker is not to be late because its reply left last
            self._send(2 * self._pause_s)

    def _missed_too_many(self, missed: Collection[_ClosedRound]) -> bool:
        """Whether no more replies may be held for a worker: the others then wait until it has these."""
        return len(missed) >= _MOST_MISSED or sum(past.reply.num_bytes for past in missed) > self.longest // 2

    def _reply_late(self, rank: int, message: Message) -> None:
        """Let the reply of the round that a worker missed leave for it."""
        worker = self._workers[rank]
        past = worker.missed.popleft()
        if message.id != past.about.id:
            self._differs(rank, message, past.about)
        worker.num_late += 1
        worker.awaited_since = time.monotonic()  # it lives, and others still wait
        self._replies.append((rank, past.reply))
        self.traffic.count("up", 0, 0, message.num_bytes)
        self.traffic.count("down", 0, past.reply.num_bytes, 0)

    def send_until(self, done: Future[Any]) -> None:
        """Let replies leave for as long as something else is under way."""
        while self._is_replying and not done.done():
            self._move(time.monotonic() + _LOOK_S)

    def _send(self, pause_s: float) -> None:
        """Let replies leave, until nothing is taken for so long."""
        since = time.monotonic()
        while self._is_replying and (until := max(since, self._sent_at) + pause_s) >= time.monotonic():
            self._move(min([until, *map(self._lost_at, self.living)]))
            self._lose_slow(self.living)

    def _move(self, until: float) -> None:
        """Send and receive until a message is through, or until then; a worker that fails is lost."""
        now = time.monotonic()
        leaving = [rank for rank in self.living if not self._workers[rank].is_replied]
        if self._replies and (not leaving or now > self._sent_at + self._pause_s):
            rank, reply = self._replies.popleft()
            leaving.append(rank)
            self._workers[rank].flow.send(reply)
            self._workers[rank].reply_begun_at = now
        if self._replies:
            until = min(until, self._sent_at + self._pause_s)
        for rank, error in move_some(self._flows, until - now).items():
            self._lose(rank, error)
        for worker in (self._workers[rank] for rank in leaving):
            if worker.is_replied and worker.awaited_since < math.inf:
                worker.awaited_since = time.monotonic()  # from now on

    @property
    def _is_replying(self) -> bool:
        return bool(self._replies) or any(flow.out.view for flow in self._flows.values())

    @property
    def _sent_at(self) -> float:
        """When any worker last took something of its reply, or one began to leave."""
        return max(flow.sent_at for flow in self._flows.values())

    @property
    def _pause_s(self) -> float:
        return min(_PAUSE_S, self.timeout_s, max(self.wait_budget_s, _LOOK_S))

    def _differs(self, rank: int, message: Message, about: Message) -> NoReturn:
        self.fail(FrameError(f"worker {rank} sent {message}, but the others sent {about}"))

    def fail(self, error: FrameError) -> NoReturn:
        """Tell all workers what went wrong, and raise it here."""
        self.reply(payload_of(str(error).encode()), Message(Kind.ERROR))
        self._drain()
        raise error

    def _drain(self) -> None:
        """Let workers close first: the kernel takes back what has not left, if it must drop what they sent last."""
        until = time.monotonic() + _GOODBYE_S
        flows = self._flows
        for flow in flows.values():
            flow.receive_into(repeat(memoryview(bytearray(_DROPPED_BYTES))))
        while flows and time.monotonic() < until:
            for rank in move_some(flows, until - time.monotonic()):
                flows.pop(rank).link.close()

    def close(self) -> None:
        """Close all connections."""
        for worker in self._workers.values():
            worker.flow.link.close()

    def _lose(self, rank: int, error: Exception) -> None:
        """Go on without a worker, and log that once."""
        why = "is gone"
        if isinstance(error, FrameError):
            why = str(error)
        elif isinstance(error, TimeoutError):
            why = f"{'was silent' if error.errno else error} for {self.timeout_s:g} s"
        worker = self._workers[rank]
        worker.flow.link.close()
        done = f"{self._num_steps} {self.unit}{'s' * (self._num_steps > 1)}"
        worker.lost = f"{why} after {done}" if self._num_steps else f"{why} before the first {self.unit}"
        self._replies = deque(reply for reply in self._replies if reply[0] != rank)
        _LOG.warning("worker %d %s; going on with %d of %d", rank, worker.lost, len(self.living), self.num_workers)


def _counted(direction: str, kind: Kind) -> str:
    """What a message counts as: training, or a kind of its own."""
    return str(kind) if str(kind) in BESIDE else direction
