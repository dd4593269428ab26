"""Messages between workers and dedicated servers, over sockets of our own.

Not over Gloo: there one receive that times out fails every other connection of its group, and the point of a
dedicated server is to outlive a worker.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import FrameError, LaunchError
from laconic.layout import Layout

HELLO, LAYOUT, PARTS, SUM, TOTAL, STATE, LOAD, STATS, CLOSE, ERROR, ECHO = range(11)
KINDS = ("hello", "layout", "parts", "sum", "total", "state", "load", "stats", "close", "error", "echo")

_HEAD = struct.Struct("<4sBxHHxxiqq")  # magic, kind, living, place, bucket, step, length
HEAD_BYTES = _HEAD.size
_LENGTH = struct.Struct("<q")
_MAGIC = b"LACS"
_SIOCGIFADDR = 0x8915
WHICH_WAY = "set GLOO_SOCKET_IFNAME to the interface that joins your machines"  # a cure


@dataclass(frozen=True)
class Message:
    """What one end says to the other; a server adds how many workers live and which of them the hearer is."""

    kind: int
    step: int = -1
    bucket: int = -1
    payload: bytes | bytearray = b""
    living: int = 0
    place: int = 0

    @property
    def id(self) -> tuple[int, int, int]:
        """What all workers' messages of a round have in common."""
        return self.kind, self.step, self.bucket

    def __str__(self) -> str:
        return KINDS[self.kind] + (f" of step {self.step}, bucket {self.bucket}" if self.step >= 0 else "")


def send(connection: socket.socket, message: Message) -> int:
    """Say it; returns the bytes that took."""
    head = _HEAD.pack(
        _MAGIC, message.kind, message.living, message.place, message.bucket, message.step, len(message.payload)
    )
    if len(message.payload) < 1 << 16:
        _push(connection, head + bytes(message.payload))
    else:
        _push(connection, head)
        _push(connection, message.payload)
    return HEAD_BYTES + len(message.payload)


def _push(connection: socket.socket, said: bytes | bytearray) -> None:
    """Send all of it; the timeout is for each part that the other end takes, where that of `sendall` is for all."""
    view = memoryview(said)
    while view:
        view = view[connection.send(view) :]


def receive(connection: socket.socket, longest: int | None = None) -> Message:
    """Hear the next message; ConnectionError where the other end is gone, TimeoutError where it is silent."""
    magic, kind, living, place, bucket, step, length = _HEAD.unpack(_exactly(connection, HEAD_BYTES))
    if magic != _MAGIC or kind >= len(KINDS) or length < 0 or (longest is not None and length > longest):
        raise FrameError("a message has no laconic header; run the same version on workers and servers")
    return Message(kind, step, bucket, _exactly(connection, length), living, place)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    fill_(connection, memoryview(buffer))
    return buffer


def fill_(connection: socket.socket, view: memoryview) -> None:
    """Overwrite all of it with what comes next; ConnectionError where the other end is gone.

    Where there is no timeout the kernel waits for all of it, and Python does not wake up for every packet.
    """
    got, how = 0, socket.MSG_WAITALL if connection.gettimeout() is None else 0
    while got < len(view):
        fresh = connection.recv_into(view[got:], 0, how)
        if fresh == 0:
            raise ConnectionError("it has hung up")
        got += fresh


def tuned(connection: socket.socket, timeout_s: float | None) -> socket.socket:
    """Small messages at once, and no wait longer than the timeout, if there is one."""
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def open_door(backlog: int) -> socket.socket:
    """A socket on which others call this process: where Gloo was told to, or at its address towards MASTER_ADDR."""
    try:
        address = _own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=backlog)
    except OSError as error:
        raise LaunchError(
            f"this process finds no address at which others could call it ({error.strerror or error}); {WHICH_WAY}"
        ) from None


def _own_address() -> str:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        import fcntl  # not on every system, and only needed here

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(packed[20:24])
    towards = os.environ.get("MASTER_ADDR") or socket.gethostname()
    found = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)
    family, _, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)  # the older kind where there are both
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def with_layout(layout: Layout, part: bytes) -> bytes:
    """A bucket's first part, behind the layout that it and later ones are of."""
    text = json.dumps([[span.name, span.num_entries] for span in layout.spans]).encode()
    return _LENGTH.pack(len(text)) + text + part


def without_layout(payload: bytes | bytearray) -> tuple[Layout, bytes | bytearray]:
    """The inverse."""
    (length,) = _LENGTH.unpack(payload[: _LENGTH.size])
    text = payload[_LENGTH.size :][:length]
    spans = json.loads(bytes(text))
    return Layout.of([name for name, _ in spans], [size for _, size in spans]), payload[_LENGTH.size + length :]


def to_bytes(tensor: Tensor) -> bytes:
    """A tensor's bytes, from whatever device."""
    return tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()


def from_bytes(payload: bytes | bytearray, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The inverse, on the CPU."""
    return torch.frombuffer(bytearray(payload), dtype=dtype) if payload else torch.empty(0, dtype=dtype)
