"""A dedicated server's end: hears every living worker, answers them, and goes on without those who are gone."""

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from laconic.errors import FrameError, LaunchError
from laconic.transport.connection import Kind, Message, longest_message, payload_of, rooms_of_message, views_of
from laconic.transport.door import Acceptor
from laconic.transport.moving import Flow, move_some
from laconic.transport.traffic import BESIDE, Traffic

_JOIN_TIMEOUT_S = 300.0  # for all workers to come
_UNSENT_BYTES = 16_384  # of an answer that may wait in the kernel while the next worker's is begun
_PAUSE_S = 0.5  # without a byte taken, after which an answer lets the next one begin
_GOODBYE_S = 5.0  # for workers to hear what went wrong
_UNHEARD_BYTES = 1 << 20  # that are dropped at once
_LOOK_S = 0.005  # after which it is looked whether an answer is found
_ASKING = (Kind.STATE, Kind.STATS, Kind.CLOSE)  # without a payload
_CARRYING = (Kind.LAYOUT, Kind.PARTS, Kind.SUM, Kind.TOTAL, Kind.AVERAGE, Kind.ECHO, Kind.LOAD)  # of what workers say
_OF_ROUNDS = (Kind.LAYOUT, Kind.PARTS, Kind.SUM, Kind.ECHO)  # that need not wait for all
_LAST = (Kind.CLOSE, Kind.ERROR)
_MOST_OWED = 16  # answers that one late worker may be owed, before all wait for it: a slow one is heard now and then


class _Past(NamedTuple):
    """A round that is over, and its answer for one who has not spoken in it yet."""

    about: Message
    reply: Message


@dataclass
class Listener:
    """Connections to M workers; a round is one message of each of the living, all about the same thing.

    Answers leave while the next round is heard, one after the other, so that who has its own goes on while others wait.
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
        self._flows: dict[int, Flow] = {}  # by rank
        self._answers: deque[tuple[int, Message]] = deque()  # that have not begun to leave, and for whom
        self._left_at: dict[int, float] = {}  # when the last one began to leave, by rank
        self._waited_for: dict[int, float] = {}  # who is not heard in this round, and since when others wait for it
        self._owed: dict[int, deque[_Past]] = {}  # rounds that went by without it
        self._catches_up = False  # whether too many did
        self._step = -1
        self._acceptor = Acceptor(self.num_workers)
        self.address = self._acceptor.address

    @property
    def living(self) -> list[int]:
        """The ranks of the workers that are there, ascending."""
        return sorted(self._flows)

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
            connection.set_timeout(0)  # who waits, waits for all of them
            self._flows[rank] = Flow(connection)
        return {rank: greeting for rank, (_, greeting) in accepted.items()}

    def hear(self, arrived: Callable[[int, Message], None]) -> dict[int, Message]:
        """The next round by rank, each message told as it arrives; FrameError, on all workers too, if one does not fit.

        Workers may train for as long as they like. Once one of them waits, the others have `timeout_s` to come.
        """
        heard = self._receive_all(arrived)
        if any(message.kind != Kind.CLOSE for message in heard.values()):
            for rank in [rank for rank, message in heard.items() if message.kind == Kind.CLOSE]:
                del heard[rank]
                if rank in self._flows:  # and not gone before its last answer was
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
        """A message of each of the living, by rank; who is not heard in time is lost, however much has come of it."""
        heard: dict[int, Message] = {}
        since = math.inf  # a first one waits
        for flow in self._flows.values():
            self._expect(flow)
        while missing := self._flows.keys() - heard.keys():
            whole = [rank for rank in missing if self._flows[rank].into.found is not None]
            if not whole:
                goes_on = self._goes_on_at(since, heard, missing)
                self._move(min([goes_on, *map(self._lost_at, missing)]))
                if time.monotonic() > goes_on:
                    break
                self._lose_slow(missing)
                continue
            rank = whole[0]
            message = self._flows[rank].take()
            if rank in self._owed:
                if message.kind == Kind.CLOSE:
                    self._lose(rank, ConnectionError())
                else:
                    self._answer_late(rank, message)
                    self._expect(self._flows[rank])
                continue
            self._waited_for.pop(rank, None)
            heard[rank] = message
            if message.kind != Kind.CLOSE and since == math.inf:  # who is done does not wait for the others
                since = time.monotonic()
                for other in self._flows.keys() - heard.keys():
                    self._waited_for.setdefault(other, since)
            arrived(rank, message)
        return dict(sorted(heard.items()))

    def _expect(self, flow: Flow) -> None:
        """Make room for a message, unless one has come, if in part."""
        if flow.into.found is None and not flow.into.view:
            flow.hear(rooms_of_message(dict.fromkeys(_ASKING, 0) | dict.fromkeys(_CARRYING, self.longest)))

    def _lost_at(self, rank: int) -> float:
        """When one is lost that is slow to take its answer, or that others wait for though it has its answer."""
        since = self._waited_for.get(rank, math.inf)
        if self._flows[rank].out.view:
            since = self._left_at[rank]
        elif any(rank == waiting for waiting, _ in self._answers):
            since = math.inf
        return since + self.timeout_s

    def _lose_slow(self, missing: Collection[int]) -> None:
        now = time.monotonic()
        for rank in missing & self._flows.keys():
            flow = self._flows[rank]
            if now > self._lost_at(rank) and flow.into.found is None:
                slow = "was slow to speak" if flow.has_moved else "was silent"
                self._lose(rank, TimeoutError("was slow to take an answer" if flow.out.view else slow))

    def _goes_on_at(self, since: float, heard: Mapping[int, Message], missing: Collection[int]) -> float:
        """When the round is over without those who are missing; for one turn they are waited for once."""
        about = next((message for message in heard.values() if message.kind != Kind.CLOSE), None)
        if about is None or about.kind not in _OF_ROUNDS or self._catches_up:
            return math.inf
        missed = [self._owed[rank][-1].about if rank in self._owed else None for rank in missing]
        same = about.step >= 0 and all(past is not None and past.step == about.step for past in missed)
        return since if same else since + self.wait_s

    def answer(self, payloads: Mapping[int, Tensor] | Tensor, to: Message) -> None:
        """Answer a round: the same for all, or to each its own; who has not taken it in time is lost."""
        living = self.living
        about = Message(to.kind, to.step, to.bucket)
        bytes_out = 0
        for place, rank in enumerate(living):
            payload = payloads if isinstance(payloads, Tensor) else payloads[rank]
            reply = replace(about, payload=payload, living=len(living), place=place)
            if rank in self._waited_for and to.kind != Kind.ERROR:
                self._owed.setdefault(rank, deque()).append(_Past(about, replace(reply, kind=Kind.LATE)))
            else:
                self._answers.append((rank, reply))
                bytes_out += reply.num_bytes
        self._catches_up = bool(self._owed) and (self._catches_up or self._owes_too_much())
        self.traffic.count(_counted("down", to.kind), 0, bytes_out, 0)
        if to.kind in _LAST:
            self._send(self.timeout_s)
        elif self.wait_s < math.inf:  # nobody is late for having been answered last
            self._send(2 * self._pause_s)

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
        self._answers.append((rank, past.reply))
        self.traffic.count("up", 0, 0, message.num_bytes)
        self.traffic.count("down", 0, past.reply.num_bytes, 0)

    def send_until(self, done: Future[Any]) -> None:
        """Let answers leave for as long as something else is under way."""
        while self._is_answering and not done.done():
            self._move(time.monotonic() + _LOOK_S)

    def _send(self, pause_s: float) -> None:
        """Let answers leave, until nothing is taken for so long."""
        since = time.monotonic()
        while self._is_answering and (until := max(since, self._taken_at) + pause_s) >= time.monotonic():
            self._move(min([until, *map(self._lost_at, self._flows)]))
            self._lose_slow(self._flows.keys())

    def _move(self, until: float) -> None:
        """Send and receive until a message is through, or so long; who fails is lost."""
        now = time.monotonic()
        leaving = {rank: flow for rank, flow in self._flows.items() if flow.out.view}
        if self._answers and (not leaving or now > self._taken_at + self._pause_s):
            rank, reply = self._answers.popleft()
            leaving[rank] = self._flows[rank]
            leaving[rank].say(views_of(reply))
            self._left_at[rank] = now
        if self._answers:
            until = min(until, self._taken_at + self._pause_s)
        for rank, error in move_some(self._flows, until - now).items():
            self._lose(rank, error)
        for rank, flow in leaving.items():
            if not flow.out.view and rank in self._waited_for:
                self._waited_for[rank] = time.monotonic()  # from now on

    @property
    def _is_answering(self) -> bool:
        return bool(self._answers) or any(flow.out.view for flow in self._flows.values())

    @property
    def _taken_at(self) -> float:
        """When any worker last took something of its answer, or one began to leave."""
        return max(flow.taken_at for flow in self._flows.values())

    @property
    def _pause_s(self) -> float:
        return min(_PAUSE_S, self.timeout_s, max(self.wait_s, _LOOK_S))

    def _differs(self, rank: int, message: Message, about: Message) -> NoReturn:
        self.fail(FrameError(f"worker {rank} sent {message}, but the others sent {about}"))

    def fail(self, error: FrameError) -> NoReturn:
        """Tell all workers what went wrong, and raise it here."""
        self.answer(payload_of(str(error).encode()), Message(Kind.ERROR))
        self._listen_no_more()
        raise error

    def _listen_no_more(self) -> None:
        """Let workers hang up first: the kernel takes back what has not left, if it must drop what they said last."""
        until = time.monotonic() + _GOODBYE_S
        for flow in self._flows.values():
            flow.hear(repeat(memoryview(bytearray(_UNHEARD_BYTES))))
        while self._flows and time.monotonic() < until:
            for rank in move_some(self._flows, until - time.monotonic()):
                self._flows.pop(rank).link.close()

    def close(self) -> None:
        """Hang up."""
        for flow in self._flows.values():
            flow.link.close()
        self._flows = {}

    def _lose(self, rank: int, error: Exception) -> None:
        """Go on without a worker, and say so once."""
        why = "is gone"
        if isinstance(error, FrameError):
            why = str(error)
        elif isinstance(error, TimeoutError):
            why = f"{'was silent' if error.errno else error} for {self.timeout_s:g} s"
        self._flows.pop(rank).link.close()
        self._answers = deque(answer for answer in self._answers if answer[0] != rank)
        self._waited_for.pop(rank, None)
        self._owed.pop(rank, None)
        self.lost[rank] = why + (f" after step {self._step}" if self._step >= 0 else " before the first step")
        self.say(f"worker {rank} {self.lost[rank]}; going on with {len(self._flows)} of {self.num_workers}")


def _counted(way: str, kind: Kind) -> str:
    """What a message counts as: training, or a kind of its own."""
    return str(kind) if str(kind) in BESIDE else way
