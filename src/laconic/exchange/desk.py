"""A dedicated server's end: hears every living worker, answers them, and goes on without those who are gone."""

from __future__ import annotations

import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping

from laconic.errors import FrameError
from laconic.exchange.talk import CLOSE, ERROR, HEAD_BYTES, HELLO, Message, open_door, receive, send, tuned
from laconic.exchange.traffic import Traffic

_HELLO_TIMEOUT_S = 300.0  # workers may still be loading their data
_UNSENT_BYTES = 16_384  # of an answer that may wait in the kernel while the next worker's is begun


class Desk:
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
        self._door.settimeout(_HELLO_TIMEOUT_S)
        while len(greetings) < self.num_workers:
            connection, _ = self._door.accept()
            hello = receive(tuned(connection, _HELLO_TIMEOUT_S))
            text = bytes(hello.payload).decode(errors="replace")
            if hello.kind != HELLO or not text.startswith(self._token) or hello.place in greetings:
                connection.close()  # a stranger
                continue
            greetings[hello.place] = Message(HELLO, payload=text.removeprefix(self._token).encode())
            self._connections[hello.place] = _one_by_one(tuned(connection, self.timeout_s))
        self._door.close()
        return greetings

    def hear(self, arrived: Callable[[int, Message], None]) -> dict[int, Message]:
        """The next round, each message told as it arrives; FrameError, on all workers too, if one is about another."""
        heard: dict[int, Message] = {}
        for rank in self.living:
            try:
                heard[rank] = receive(self._connections[rank])
            except (OSError, FrameError) as error:
                self._lose(rank, error)
            else:
                arrived(rank, heard[rank])
        total = sum(HEAD_BYTES + len(message.payload) for message in heard.values())
        self.traffic.count("up", 0, 0, total)
        if heard:
            (usual, _), *_ = Counter(message.id for message in heard.values()).most_common(1)
            for rank, message in list(heard.items()):
                if message.kind == CLOSE != usual[0]:
                    del heard[rank]
                    self._lose(rank, ConnectionError())
                elif message.id != usual:
                    expected = next(other for other in heard.values() if other.id == usual)
                    self.fail(FrameError(f"worker {rank} sent {message}, but the others sent {expected}"))
            self._step = max(self._step, usual[1])
        return heard

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
        self.traffic.count("down", 0, out, 0)

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
        self.lost[rank] = f"{why} after step {self._step}"
        self._say(f"worker {rank} {self.lost[rank]}; going on with {len(self._connections)} of {self.num_workers}")


def _one_by_one(connection: socket.socket) -> socket.socket:
    """Answers that share a link end one after another, not all at once: who has its own goes on while others wait."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return connection
