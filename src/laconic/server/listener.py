"""A dedicated server's end: hears every living worker, answers them, and goes on without those who are gone."""

import math
import selectors
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from torch import Tensor

from laconic.errors import FrameError, LaunchError
from laconic.transport.connection import (
    Connection,
    Cursor,
    Kind,
    Message,
    longest_message,
    payload_of,
    rooms_of_message,
    views_of,
)
from laconic.transport.door import Acceptor
from laconic.transport.traffic import BESIDE, Traffic

_JOIN_TIMEOUT_S = 300.0  # for all workers to come
_UNSENT_BYTES = 16_384  # of an answer that may wait in the kernel while the next worker's is begun
_PAUSE_S = 0.5  # after which a worker that takes nothing of its answer lets the next one go before
_LULL_S = 0.005  # without a byte from a worker, after which the next one is read
_TURN_S = 0.2  # for which one is read while others wait for that
_CARRYING = (Kind.LAYOUT, Kind.PARTS, Kind.SUM, Kind.TOTAL, Kind.AVERAGE, Kind.ECHO, Kind.LOAD)  # of what workers say
_OF_ROUNDS = (Kind.LAYOUT, Kind.PARTS, Kind.SUM, Kind.ECHO)  # that need not wait for all
_MOST_OWED = 16  # answers that one late worker may be owed, before all wait for it: a slow one is heard now and then
_SLOW_TO_TAKE = "was slow to take an answer"


class _Past(NamedTuple):
    """A round that is over, and its answer for one who has not spoken in it yet."""

    about: Message
    reply: Message


@dataclass
class Listener:
    """Connections to M workers; a round is one message of each of the living, all about the same thing.

    A round of training is over once `wait_s`, the wait budget, have passed since a first worker spoke. Whoever speaks
    later has the answer that the others had, marked as late.
    """

    num_workers: int
    timeout_s: float
    say: Callable[[str], None] = lambda text: print(f"laconic: {text}", file=sys.stderr, flush=True)
    wait_s: float = math.inf

    def __post_init__(self) -> None:
        self.traffic = Traffic()
        self.lost: dict[int, str] = {}  # rank -> why
        self.late: dict[int, int] = {}  # rank -> its messages that came too late
        self.longest = longest_message()  # bytes of a message, until the workers have said what they train
        self._connections: dict[int, Connection] = {}
        self._begun: dict[int, Cursor] = {}  # messages that have come in part, by rank
        self._leaving: dict[int, deque[memoryview]] = {}  # answers that have gone in part
        self._waited_for: dict[int, float] = {}  # since when others wait for this one
        self._owed: dict[int, deque[_Past]] = {}  # rounds that went by without it
        self._catches_up = False  # whether too many did
        self._step = -1
        self._acceptor = Acceptor(self.num_workers)
        self.address = self._acceptor.address

    @property
    def living(self) -> list[int]:
        """The ranks of the workers that are there, ascending."""
        return sorted(self._connections)

    def accept(self) -> dict[int, str]:
        """Let all workers in; what each said by way of greeting."""
        accepted = self._acceptor.accept(range(self.num_workers), _JOIN_TIMEOUT_S)
        self._acceptor.close()
        if len(accepted) < self.num_workers:
            for connection, _ in accepted.values():
                connection.close()
            raise LaunchError(
                f"{len(accepted)} of {self.num_workers} workers came to this server; see what the others said"
            )
        for rank, (connection, _) in accepted.items():
            connection.give_up_after(self.timeout_s)
            connection.limit_unsent(_UNSENT_BYTES)  # who has its answer goes on while others wait for theirs
            self._connections[rank] = connection
        return {rank: greeting for rank, (_, greeting) in accepted.items()}

    def hear(self, arrived: Callable[[int, Message], None]) -> dict[int, Message]:
        """The next round by rank, each message told as it arrives; FrameError, on all workers too, if one does not fit.

        Workers may train for as long as they like. Once one of them waits, the others have `timeout_s` to come.
        """
        heard = self._receive_all(arrived)
        if any(message.kind != Kind.CLOSE for message in heard.values()):
            for rank in [rank for rank, message in heard.items() if message.kind == Kind.CLOSE]:
                del heard[rank]
                self._lose(rank, ConnectionError())
        if heard:
            usual = statistics.mode(message.id for message in heard.values())
            about = next(message for message in heard.values() if message.id == usual)
            for rank, message in heard.items():
                if message.id != usual:
                    self._differs(rank, message, about)
            self._step = max(self._step, about.step)
            bytes_in = sum(message.num_bytes for message in heard.values())
            self.traffic.count(_counted("up", about.kind), 0, 0, bytes_in)
        return heard

    def _receive_all(self, arrived: Callable[[int, Message], None]) -> dict[int, Message]:
        """A message of each of the living, by rank; who is not heard in time is lost, however much has come of it.

        Each is read for as long as its bytes keep coming, so that its part is decoded while those of others come.
        """
        heard: dict[int, Message] = {}
        most = dict.fromkeys((Kind.STATE, Kind.STATS, Kind.CLOSE), 0) | dict.fromkeys(_CARRYING, self.longest)
        since = math.inf  # a first one waits
        with selectors.DefaultSelector() as waiting:
            for rank, connection in self._connections.items():
                waiting.register(connection, _event(rank in self._leaving), rank)
            while missing := {key.data for key in waiting.get_map().values()}:
                goes_on = self._goes_on_at(since, heard, missing)
                until = min([goes_on, *(self._waited_for.get(rank, math.inf) + self.timeout_s for rank in missing)])
                left_s = None if until == math.inf else max(0.0, until - time.monotonic())
                ready = {key.data for key, _ in waiting.select(left_s)}
                now = time.monotonic()
                if now > goes_on:
                    break
                for rank in [rank for rank in missing if now > self._waited_for.get(rank, now) + self.timeout_s]:
                    waiting.unregister(self._connections[rank])
                    self._lose(rank, TimeoutError(self._slowness(rank)))
                    ready.discard(rank)
                for rank in ready & self._leaving.keys():
                    self._go_on_answering(rank, waiting)
                    ready.discard(rank)
                for rank in ready - self._begun.keys():
                    self._begun[rank] = Cursor(rooms_of_message(most))
                rank = next((rank for rank in self._begun if rank in ready), -1)
                if rank < 0:
                    continue
                connection = self._connections[rank]
                cursor = self._begun.pop(rank)
                self._begun[rank] = cursor  # behind the others, if it takes longer than a turn
                try:
                    connection.receive_while_it_comes(cursor, _LULL_S, _TURN_S)
                except (OSError, FrameError) as error:
                    waiting.unregister(connection)
                    self._lose(rank, error)
                    continue
                if cursor.view:
                    continue
                del self._begun[rank]
                if rank in self._owed:
                    self._answer_late(rank, cursor.found)
                    self._go_on_answering(rank, waiting)
                    continue
                waiting.unregister(connection)
                self._waited_for.pop(rank, None)
                heard[rank] = cursor.found
                if heard[rank].kind != Kind.CLOSE and since == math.inf:  # who is done does not wait for the others
                    since = time.monotonic()
                    for other in self._connections.keys() - heard.keys():
                        self._waited_for.setdefault(other, since)
                arrived(rank, heard[rank])
        return dict(sorted(heard.items()))

    def _goes_on_at(self, since: float, heard: Mapping[int, Message], missing: Collection[int]) -> float:
        """When the round is over without those who are missing; for one turn they are waited for once."""
        about = next((message for message in heard.values() if message.kind != Kind.CLOSE), None)
        if about is None or about.kind not in _OF_ROUNDS or self._catches_up:
            return math.inf
        missed = [self._owed[rank][-1].about if rank in self._owed else None for rank in missing]
        same = about.step >= 0 and all(past is not None and past.step == about.step for past in missed)
        return since if same else since + self.wait_s

    def answer(self, payloads: Mapping[int, Tensor] | Tensor, to: Message) -> None:
        """Answer a round: the same for all, or to each its own; who takes longer than `timeout_s` to take it is lost.

        One after the other, so that who has its answer goes on while others wait, and past whoever takes nothing.
        """
        living = self.living
        about = Message(to.kind, to.step, to.bucket)
        bytes_out = 0
        leaving: deque[int] = deque()
        left_s = dict.fromkeys(living, self.timeout_s)
        pause_s = min(_PAUSE_S, self.timeout_s, max(self.wait_s, _LULL_S))
        for place, rank in enumerate(living):
            payload = payloads if isinstance(payloads, Tensor) else payloads[rank]
            reply = replace(about, payload=payload, living=len(living), place=place)
            if rank in self._waited_for and to.kind != Kind.ERROR:
                self._owed.setdefault(rank, deque()).append(_Past(about, replace(reply, kind=Kind.LATE)))
                continue
            self._leaving.setdefault(rank, deque()).extend(views_of(reply))
            leaving.append(rank)
            bytes_out += reply.num_bytes
        while leaving:
            rank = leaving.popleft()
            since = time.monotonic()
            try:
                self._connections[rank].send_while_taken(self._leaving[rank], pause_s)
                left_s[rank] -= time.monotonic() - since
                if self._leaving[rank] and left_s[rank] <= 0:
                    raise TimeoutError(_SLOW_TO_TAKE)
            except OSError as error:
                self._lose(rank, error)
            else:
                if not self._leaving[rank]:
                    del self._leaving[rank]
                elif to.kind not in _OF_ROUNDS or left_s[rank] > self.timeout_s - self.wait_s:
                    leaving.append(rank)  # and else while the next round is heard
        self._catches_up = bool(self._owed) and (self._catches_up or self._owes_too_much())
        self.traffic.count(_counted("down", to.kind), 0, bytes_out, 0)

    def _owes_too_much(self) -> bool:
        """Whether no more answers may be held for those who are late: the others wait until these are with them."""
        longest = max(self._owed.values(), key=len)
        return len(longest) >= _MOST_OWED or sum(past.reply.num_bytes for past in longest) > self.longest // 2

    def _answer_late(self, rank: int, message: Message) -> None:
        """Let the answer of the round that a worker missed leave for it."""
        past = self._owed[rank].popleft()
        if message.id != past.about.id:
            self._differs(rank, message, past.about)
        if not self._owed[rank]:
            del self._owed[rank]
        self.late[rank] = self.late.get(rank, 0) + 1
        self._waited_for[rank] = time.monotonic()  # it lives, and others still wait
        self._leaving[rank] = deque(views_of(past.reply))
        self.traffic.count("up", 0, 0, message.num_bytes)
        self.traffic.count("down", 0, past.reply.num_bytes, 0)

    def _go_on_answering(self, rank: int, waiting: selectors.BaseSelector) -> None:
        """Give a worker as much of its answer as it takes now."""
        connection = self._connections[rank]
        try:
            connection.send_while_taken(self._leaving[rank], _LULL_S, _TURN_S)
        except OSError as error:
            waiting.unregister(connection)
            self._lose(rank, error)
            return
        if not self._leaving[rank]:
            del self._leaving[rank]
        waiting.modify(connection, _event(rank in self._leaving), rank)

    def _slowness(self, rank: int) -> str:
        if rank in self._leaving:
            return _SLOW_TO_TAKE
        return "was slow to speak" if rank in self._begun else "was silent"

    def _differs(self, rank: int, message: Message, about: Message) -> NoReturn:
        self.fail(FrameError(f"worker {rank} sent {message}, but the others sent {about}"))

    def fail(self, error: FrameError) -> NoReturn:
        """Tell all workers what went wrong, and raise it here."""
        self.answer(payload_of(str(error).encode()), Message(Kind.ERROR))
        raise error

    def close(self) -> None:
        """Hang up."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _lose(self, rank: int, error: Exception) -> None:
        """Go on without a worker, and say so once."""
        why = "is gone"
        if isinstance(error, FrameError):
            why = str(error)
        elif isinstance(error, TimeoutError):
            why = f"{'was silent' if error.errno else error} for {self.timeout_s:g} s"
        self._connections.pop(rank).close()
        for kept in (self._begun, self._leaving, self._waited_for, self._owed):
            kept.pop(rank, None)
        self.lost[rank] = why + (f" after step {self._step}" if self._step >= 0 else " before the first step")
        self.say(f"worker {rank} {self.lost[rank]}; going on with {len(self._connections)} of {self.num_workers}")


def _event(is_answered: bool) -> int:
    return selectors.EVENT_WRITE if is_answered else selectors.EVENT_READ


def _counted(way: str, kind: Kind) -> str:
    """What a message counts as: training, or a kind of its own."""
    return str(kind) if str(kind) in BESIDE else way
