"""Framed messages over TCP connections of our own: between workers and dedicated servers, and between gossiping peers.

Not over Gloo: there one receive that times out closes every other connection of its group, a message whose sender dies
half-way is waited for for ever, and a request takes three handshakes and two new threads: 2 to 4 ms of one that takes
8 in all (75,770 entries, two busy processes on two cores).
"""

import socket
import ssl
import struct
import threading
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.fault_points import through_fault_point
from laconic.transport.tls import secured


class Kind(IntEnum):
    """The purpose of a message."""

    HELLO = 0  # the terms of a caller that has shown that it knows the key
    LAYOUT = auto()  # parts, behind the layout that they and later ones are of
    PARTS = auto()
    SUM = auto()
    TOTAL = auto()  # a sum that is not of gradients
    ECHO = auto()
    STATE = auto()
    LOAD = auto()
    STATS = auto()
    CLOSE = auto()
    ERROR = auto()
    REQUEST = auto()  # a request that is answered by as many bytes as it asks for, without a head
    COMBINE = auto()
    AVERAGE = auto()  # a sum of models, over all that live
    LATE = auto()  # the reply of a round that was closed before its receiver's message came
    MEMBER = auto()  # between a member and its server; what it is for stands in its payload

    def __str__(self) -> str:
        return self.name.lower()


_HEAD = struct.Struct("<2sBBHHiiqq")  # magic, kind, type, living, place, bucket, step, bytes of payload, of the reply
HEAD_BYTES = _HEAD.size
_MAGIC = b"LC"
_TYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_NOTHING = torch.empty(0, dtype=torch.uint8)

_GOODBYE_S = 5.0  # for what is still to be encrypted
_A_MOMENT_S = 1e-6  # since a timeout of 0 would mean a socket that never waits, with another error
_PROBES = 4  # that the kernel sends before it takes a silent host for dead
_SMALL_BYTES = 65_536  # of a payload that is copied behind its head: one packet less
_MORE = getattr(socket, "MSG_MORE", 0)  # a head goes with what follows it


@dataclass(frozen=True)
class Message:
    """A message from one end to the other; a server adds how many workers live and which of them the receiver is."""

    kind: Kind
    step: int = -1
    bucket: int = -1
    payload: Tensor = _NOTHING  # on the CPU, of one dimension
    living: int = 0
    place: int = 0
    reply_bytes: int = 0  # that a request awaits

    @property
    def id(self) -> tuple[Kind, int, int]:
        """The part that all workers' messages of a round have in common."""
        return self.kind, self.step, self.bucket

    @property
    def num_bytes(self) -> int:
        """Its bytes on the wire."""
        return HEAD_BYTES + self.payload.nbytes

    @property
    def text(self) -> bytes:
        """The payload as Python's bytes."""
        return self.payload.numpy().tobytes()

    def __str__(self) -> str:
        return f"{self.kind}" + (f" of step {self.step}, bucket {self.bucket}" if self.step >= 0 else "")


class Connection:
    """One TCP connection, under TLS where a context for that is given; small messages leave at once."""

    world_rank: int | None = None  # of the other end, where that is known
    _relay: threading.Thread | None = None

    def __init__(
        self, link: socket.socket, timeout_s: float | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._link = self._wire = link
        if context is not None:
            self._link, self._wire, self._relay = secured(link, context)
        self.set_timeout(timeout_s)

    def fileno(self) -> int:
        """For selectors."""
        return self._link.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Wait no longer than this for the next bytes to come or to be taken."""
        self._link.settimeout(timeout_s)

    def give_up_after(self, silence_s: float) -> None:
        """Take a host for dead that answers no probe of the kernel for so long; one that ends is known at once."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            pause_s = min(max(1, round(silence_s / (_PROBES + 1))), 32_767)
            options = {
                socket.TCP_KEEPIDLE: pause_s,
                socket.TCP_KEEPINTVL: pause_s,
                socket.TCP_KEEPCNT: _PROBES,
                socket.TCP_USER_TIMEOUT: round(min(1e3 * silence_s, 2**31 - 1)),
            }
            for option, value in options.items():
                self._wire.setsockopt(socket.IPPROTO_TCP, option, value)

    def limit_unsent(self, num_bytes: int) -> None:
        """Let no more than this wait in the kernel: messages that share a link then end one after another."""
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)

    def send(self, message: Message) -> int:
        """Send a message; returns its bytes. The timeout is for each part that the other end takes."""
        head, *payload = views_of(message)
        self._send(head, _MORE if payload else 0)
        for view in payload:
            self._send(view)
        return message.num_bytes

    def send_bytes(self, payload: Tensor) -> None:
        """Send what the other end knows the length of."""
        self._send(payload.view(torch.uint8).numpy().data)

    def _send(self, view: memoryview, flags: int = 0) -> None:
        """Send all of it; the timeout is for each part that the other end takes, where that of `sendall` is for all."""
        view = through_fault_point("connection.send", view, self)
        while view:
            view = view[self._link.send(view, flags) :]

    def send_some(self, view: memoryview) -> int:
        """Send as much of it as the link takes now; how many bytes that is."""
        return self._link.send(view)

    def receive_some(self, view: memoryview, flags: int = 0) -> int:
        """Fill as much of it as is there; how many bytes that is."""
        fresh = self._link.recv_into(view, 0, flags)
        if fresh == 0:
            raise ConnectionError("it has closed the connection")
        return fresh

    def receive(self, most: Mapping[Kind, int], timeout_s: float | None = None) -> Message:
        """Receive the next message, whole within so long; `most` are the bytes that one of each awaited kind may have.

        ConnectionError where the other end is gone, TimeoutError where it is overdue, FrameError where it sends
        anything else.
        """
        message: Message = self.fill(Cursor(rooms_of_message(most)), timeout_s)
        return message

    def receive_bytes(self, num_bytes: int) -> Tensor:
        """The next bytes; where there is no timeout the kernel waits for all, and Python wakes up once."""
        received = torch.empty(num_bytes, dtype=torch.uint8)
        self.fill(Cursor([received.numpy().data]), None)
        return received

    def fill(self, cursor: "Cursor", timeout_s: float | None) -> Any:
        """Receive all that there is room for, within so long; the cursor's result."""
        if timeout_s is None:
            while cursor.view:
                cursor.advance(self.receive_some(cursor.view, socket.MSG_WAITALL))
            return cursor.result
        until = time.monotonic() + timeout_s
        before = self._link.gettimeout()
        try:
            while cursor.view:
                self._link.settimeout(max(until - time.monotonic(), _A_MOMENT_S))
                cursor.advance(self.receive_some(cursor.view))
        finally:
            self._link.settimeout(before)
        return cursor.result

    def shut_down(self) -> None:
        """End it for both; a thread that waits on it finds that out."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back, once what was sent is on its way."""
        self._link.close()
        if self._relay is not None:
            self._relay.join(_GOODBYE_S)


class Cursor:
    """A place in memory that is being sent, or filled."""

    def __init__(self, rooms: Iterable[memoryview]) -> None:
        self.view = memoryview(b"")  # what comes next; empty at the end
        self.result: Any = None  # what a generator of rooms returns then
        self._rooms: Iterator[memoryview] = iter(rooms)
        self.advance(0)

    def extend(self, rooms: Iterable[memoryview]) -> None:
        """Continue with these after what is left; the result of a generator before them is dropped."""
        self._rooms = chain(self._rooms, rooms) if self.view else iter(rooms)
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        self.view = self.view[num_bytes:]
        while not self.view:
            try:
                self.view = next(self._rooms)
            except StopIteration as end:
                self.result = self.result or end.value
                return


def views_of(message: Message) -> list[memoryview]:
    """The bytes of a message: its head and its payload, in one piece where that is small, or else behind it."""
    payload = message.payload
    head = bytearray(_HEAD.size)
    _HEAD.pack_into(
        head,
        0,
        _MAGIC,
        message.kind,
        _TYPES.index(payload.dtype),
        message.living,
        message.place,
        message.bucket,
        message.step,
        payload.nbytes,
        message.reply_bytes,
    )
    body = payload.view(torch.uint8).numpy().data
    return [memoryview(head + body)] if payload.nbytes <= _SMALL_BYTES else [memoryview(head), body]


def rooms_of_message(most: Mapping[Kind, int]) -> Generator[memoryview, None, Message]:
    """Room for a message's head, then for as many bytes as it says and its kind may have; the message."""
    head = bytearray(HEAD_BYTES)
    yield memoryview(head)
    magic, kind, type_, living, place, bucket, step, length, reply_bytes = _HEAD.unpack(head)
    if magic != _MAGIC or kind >= len(Kind) or type_ >= len(_TYPES) or length % _TYPES[type_].itemsize:
        raise FrameError("sent something without a laconic header")
    longest = most.get(Kind(kind), -1)
    if longest < 0:
        raise FrameError(f"sent {Kind(kind)} where that is not expected")
    if not 0 <= length <= longest or not 0 <= reply_bytes <= longest:
        raise FrameError(f"sent {Kind(kind)} of {max(length, reply_bytes)} bytes, of at most {longest}")
    payload = torch.empty(length, dtype=torch.uint8)
    yield payload.numpy().data
    return Message(Kind(kind), step, bucket, payload.view(_TYPES[type_]), living, place, reply_bytes)


def longest_message(model: Collection[Tensor] = ()) -> int:
    """Bytes that no message about these tensors exceeds: wide values and places, names, a few numbers."""
    return sum(16 * tensor.numel() + 4096 for tensor in model) + (1 << 20)


def payload_of(text: bytes) -> Tensor:
    """Bytes as a message carries them."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _NOTHING
