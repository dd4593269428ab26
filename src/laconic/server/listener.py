"""A dedicated server's end: hears every living worker, answers them, and goes on without those who are gone."""

from __future__ import annotations

import math
import secrets
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping

from laconic.errors import FrameError, LaunchError
from laconic.transport.connection import (
    CLOSE,
    ERROR,
    HEAD_BYTES,
    HELLO,
    KINDS,
    Message,
    open_door,
    receive,
    send,
    tuned,
)
from laconic.transport.traffic import BESIDE, Traffic

_DOOR_S = 300.0  # for workers to come
_HELLO_S, _HELLO_BYTES = 5.0, 65_536  # for one that has come to say who it is; strangers may say anything, or nothing
_UNSENT_BYTES = 16_384  # of an answer that may wait in the kernel while the next worker's is begun


class Listener:
    """Connections to M workers; a round is one message of each of the living, all about the same thing."""

    def __init__(self, num_workers: int, timeout_s: float, say: Callable[[str], None] | None = None) -> None:
        self.num_workers, self.timeout_s = num_workers, timeout_s
        self.traffic = Traffic()
        self.lost: dict[int, str] = {}  # rank -> why
        self._say = say or (lambda text: print(f"laconic: {text}", file=sys.stderr, flush=True))
        self._connections: dict[int, socket.socket] = {}
        self._step = -1
        self._token = secrets.token_hex(16)
        self._door = open_door(num_workers)

    @property
    def address(self) -> tuple[str, int, str]:
        """What a worker needs to know: host, port, and the token that shows it was told."""
        host, port = self._door.getsockname()[:2]
        return host, port, self._token

    @property
    def living(self) -> list[int]:
        """The ranks of the workers that are there, ascending."""
        return sorted(self._connections)

    def welcome(self) -> dict[int, Message]:
        """Let all workers in; what each said by way of greeting, after the token."""
        greetings: dict[int, Message] = {}
        self._door.settimeout(_DOOR_S)
        while len(greetings) < self.num_workers:
            try:
                connection, _ = self._door.accept()
            except TimeoutError:
                raise LaunchError(
                    f"{len(greetings)} of {self.num_workers} workers came to this server; see what the others said"
                ) from None
            try:
                hello = receive(tuned(connection, _HELLO_S), _HELLO_BYTES)
            except (OSError, FrameError):
                hello = Message(ERROR)
            text = bytes(hello.payload).decode(errors="replace")
            if hello.kind != HELLO or not text.startswith(self._token) or hello.place in greetings:
                connection.close()  # a stranger
                continue
            greetings[hello.place] = Message(HELLO, payload=text.removeprefix(self._token).encode())
            self._connections[hello.place] = _watched(_one_by_one(tuned(connection, self.timeout_s)), self.timeout_s)
        self._door.close()
        return greetings

    def hear(self, arrived: Callable[[int, Message], None]) -> dict[int, Message]:
        """The next round by rank, each message told as it arrives; FrameError, on all workers too, if one does not fit.

        Workers may train for as long as they like. Once one of them waits, the others have `timeout_s` to come.
        """
        heard = self._receive_all(arrived)
        if any(message.kind != CLOSE for message in heard.values()):
            for rank in [rank for rank, message in heard.items() if message.kind == CLOSE]:
                del heard[rank]
                self._lose(rank, ConnectionError())
        if heard:
            (usual, _), *_ = Counter(message.id for message in heard.values()).most_common(1)
            for rank, message in heard.items():
                if message.id != usual:
                    expected = next(other for other in heard.values() if other.id == usual)
                    self.fail(FrameError(f"worker {rank} sent {message}, but the others sent {expected}"))
            self._step = max(self._step, usual[1])
            total = sum(HEAD_BYTES + len(message.payload) for message in heard.values())
            self.traffic.count(_counted("up", usual[0]), 0, 0, total)
        return heard

    def _receive_all(self, arrived: Callable[[int, Message], None]) -> dict[int, Message]:
        """A message of each of the living, by rank; who is not heard is lost."""
        heard: dict[int, Message] = {}
        until = math.inf
        with selectors.DefaultSelector() as waiting:
            for rank, connection in self._connections.items():
                waiting.register(connection, selectors.EVENT_READ, rank)
            while waiting.get_map():
                left = None if until == math.inf else max(0.0, until - time.monotonic())
                ready = waiting.select(left)
                if not ready and left is not None:
                    for key in waiting.get_map().values():
                        self._lose(key.data, TimeoutError())
                    break
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    try:
                        heard[key.data] = receive(self._connections[key.data])
                    except (OSError, FrameError) as error:
                        self._lose(key.data, error)
                        continue
                    if heard[key.data].kind != CLOSE:  # who is done does not wait for the others
                        until = min(until, time.monotonic() + self.timeout_s)
                    arrived(key.data, heard[key.data])
        return dict(sorted(heard.items()))

    def answer(self, payloads: Mapping[int, bytes] | bytes, to: Message) -> None:
        """Answer a round: the same for all, or to each its own."""
        living, out = self.living, 0
        for place, rank in enumerate(living):
            payload = payloads if isinstance(payloads, bytes) else payloads[rank]
            reply = Message(to.kind, to.step, to.bucket, payload, len(living), place)
            try:
                out += send(self._connections[rank], reply)
            except OSError as error:
                self._lose(rank, error)
        self.traffic.count(_counted("down", to.kind), 0, out, 0)

    def fail(self, error: FrameError) -> None:
        """Tell all workers what went wrong, and raise it here."""
        self.answer(str(error).encode(), Message(ERROR))
        raise error

    def close(self) -> None:
        """Hang up."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _lose(self, rank: int, error: Exception) -> None:
        """Go on without a worker, and say so once."""
        why = f"was silent for {self.timeout_s:g} s" if isinstance(error, TimeoutError) else "is gone"
        self._connections.pop(rank).close()
        self.lost[rank] = why + (f" after step {self._step}" if self._step >= 0 else " before the first step")
        self._say(f"worker {rank} {self.lost[rank]}; going on with {len(self._connections)} of {self.num_workers}")


def _counted(way: str, kind: int) -> str:
    """What a message counts as: training, or a kind of its own."""
    return KINDS[kind] if KINDS[kind] in BESIDE else way


def _watched(connection: socket.socket, timeout_s: float) -> socket.socket:
    """Let the kernel ask now and then whether the other host is there: of one that has vanished nothing is heard."""
    if hasattr(socket, "TCP_KEEPIDLE"):
        pause = max(1, round(timeout_s / 5))
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, pause)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    return connection


def _one_by_one(connection: socket.socket) -> socket.socket:
    """Answers that share a link end one after another, not all at once: who has its own goes on while others wait."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return connection
