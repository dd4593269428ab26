"""A dedicated server's end: hears every living worker, answers them, and goes on without those who are gone."""

import selectors
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

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
_CARRYING = (Kind.LAYOUT, Kind.PARTS, Kind.SUM, Kind.TOTAL, Kind.ECHO, Kind.LOAD)  # of what workers say


@dataclass
class Listener:
    """Connections to M workers; a round is one message of each of the living, all about the same thing."""

    num_workers: int
    timeout_s: float
    say: Callable[[str], None] = lambda text: print(f"laconic: {text}", file=sys.stderr, flush=True)

    def __post_init__(self) -> None:
        self.traffic = Traffic()
        self.lost: dict[int, str] = {}  # rank -> why
        self.longest = longest_message()  # bytes of a message, until the workers have said what they train
        self._connections: dict[int, Connection] = {}
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
                    self.fail(FrameError(f"worker {rank} sent {message}, but the others sent {about}"))
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
        begun: dict[int, Cursor] = {}
        until: float | None = None  # for as long as nobody waits
        with selectors.DefaultSelector() as waiting:
            for rank, connection in self._connections.items():
                waiting.register(connection, selectors.EVENT_READ, rank)
            while waiting.get_map():
                ready = {key.data for key, _ in waiting.select(until and max(0.0, until - time.monotonic()))}
                if until and time.monotonic() > until:
                    for key in waiting.get_map().values():
                        self._lose(key.data, TimeoutError("was slow to speak" if key.data in begun else "was silent"))
                    break
                for rank in ready - begun.keys():
                    begun[rank] = Cursor(rooms_of_message(most))
                rank = next((rank for rank in begun if rank in ready), -1)
                if rank < 0:
                    continue
                connection = self._connections[rank]
                cursor = begun[rank]
                begun[rank] = begun.pop(rank)  # behind the others, if it takes longer than a turn
                try:
                    connection.receive_while_it_comes(cursor, _LULL_S, _TURN_S)
                except (OSError, FrameError) as error:
                    waiting.unregister(connection)
                    self._lose(rank, error)
                    continue
                if not cursor.view:
                    waiting.unregister(connection)
                    heard[rank] = cursor.found
                    if heard[rank].kind != Kind.CLOSE:  # who is done does not wait for the others
                        until = until or time.monotonic() + self.timeout_s
                    arrived(rank, heard[rank])
        return dict(sorted(heard.items()))

    def answer(self, payloads: Mapping[int, Tensor] | Tensor, to: Message) -> None:
        """Answer a round: the same for all, or to each its own; who takes longer than `timeout_s` to take it is lost.

        One after the other, so that who has its answer goes on while others wait, and past whoever takes nothing.
        """
        living = self.living
        bytes_out = 0
        leaving: deque[tuple[int, deque[memoryview]]] = deque()
        left_s = dict.fromkeys(living, self.timeout_s)
        for place, rank in enumerate(living):
            payload = payloads if isinstance(payloads, Tensor) else payloads[rank]
            reply = Message(to.kind, to.step, to.bucket, payload, len(living), place)
            leaving.append((rank, deque(views_of(reply))))
            bytes_out += reply.num_bytes
        while leaving:
            rank, views = leaving.popleft()
            since = time.monotonic()
            try:
                self._connections[rank].send_while_taken(views, min(_PAUSE_S, self.timeout_s))
                left_s[rank] -= time.monotonic() - since
                if views and left_s[rank] <= 0:
                    raise TimeoutError("was slow to take an answer")
            except OSError as error:
                self._lose(rank, error)
            else:
                if views:
                    leaving.append((rank, views))
        self.traffic.count(_counted("down", to.kind), 0, bytes_out, 0)

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
        self.lost[rank] = why + (f" after step {self._step}" if self._step >= 0 else " before the first step")
        self.say(f"worker {rank} {self.lost[rank]}; going on with {len(self._connections)} of {self.num_workers}")


def _counted(way: str, kind: Kind) -> str:
    """What a message counts as: training, or a kind of its own."""
    return str(kind) if str(kind) in BESIDE else way
