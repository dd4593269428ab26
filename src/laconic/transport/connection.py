"""Framed messages over TCP connections of our own: between workers and dedicated servers, and between gossiping peers.

Not over Gloo: there one receive that times out closes every other connection of its group, a message whose sender dies
half-way is waited for for ever, and a question takes three hand-shakes and two new threads: 2 to 4 ms of one that takes
8 in all (75,770 entries, two busy processes on two cores).
"""

import hmac
import json
import os
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.errors import FrameError, LaunchError
from laconic.transport.tls import certificate, secured


class Kind(IntEnum):
    """What a message is for."""

    HELLO = 0  # who calls, and that it was told where
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
    QUESTION = auto()  # answered by as many bytes as it asks for, without a head
    COMBINE = auto()

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

TellAll = Callable[[Tensor], Tensor]  # one worker's bytes -> everyone's, by rank

_GREETING_S = 10.0  # for one that has called to say who it is; strangers may say anything, or nothing
_MOST_GREETINGS = 256  # at once: beyond, who has taken longest is turned away
_LOOK_S = 0.2  # at most between two looks at the clock
_HELLO_BYTES = 65_536
_NONCE_BYTES = _PROOF_BYTES = 32
_PROOF = struct.Struct("<I32s32s")  # who calls, its nonce, its proof
_MEET_TIMEOUT_S = 60.0  # between two that have just met elsewhere
_GOODBYE_S = 5.0  # for what is still to be encrypted
_A_MOMENT_S = 1e-6  # since a timeout of 0 would not wait, but say so in other words
_CARD_BYTES = 2048  # in which a worker says where it is, or why it cannot be called
_REASON_CHARACTERS = 300  # of which JSON may make six bytes each
_PROBES = 4  # that the kernel sends before it takes a silent host for dead
_MORE = getattr(socket, "MSG_MORE", 0)  # a head goes with what follows it
_SIOCGIFADDR = 0x8915
_CURE = "set GLOO_SOCKET_IFNAME to the interface that joins your machines"


@dataclass(frozen=True)
class Message:
    """What one end says to the other; a server adds how many workers live and which of them the hearer is."""

    kind: Kind
    step: int = -1
    bucket: int = -1
    payload: Tensor = _NOTHING  # on the CPU, of one dimension
    living: int = 0
    place: int = 0
    reply_bytes: int = 0  # that a question awaits

    @property
    def id(self) -> tuple[Kind, int, int]:
        """What all workers' messages of a round have in common."""
        return self.kind, self.step, self.bucket

    @property
    def num_bytes(self) -> int:
        """What it takes on the wire."""
        return HEAD_BYTES + self.payload.nbytes

    @property
    def text(self) -> bytes:
        """The payload as Python's bytes."""
        return self.payload.numpy().tobytes()

    def __str__(self) -> str:
        return f"{self.kind}" + (f" of step {self.step}, bucket {self.bucket}" if self.step >= 0 else "")


class Address(NamedTuple):
    """Where a process can be called, and the token that shows that a caller was told."""

    host: str
    port: int
    token: str


class Connection:
    """One TCP connection, under TLS where a context for that is given; small messages leave at once."""

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
        """Take a host that says nothing, not even that it lives, for dead; one that dies in order says so at once."""
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
        """Say it; returns the bytes that took. The timeout is for each part that the other end takes."""
        head, *payload = views_of(message)
        self._send(head, _MORE if payload else 0)
        for view in payload:
            self._send(view)
        return message.num_bytes

    def send_bytes(self, said: Tensor) -> None:
        """Say what the other end knows the length of."""
        self._send(said.view(torch.uint8).numpy().data)

    def _send(self, view: memoryview, flags: int = 0) -> None:
        """Send all of it; the timeout is for each part that the other end takes, where that of `sendall` is for all."""
        while view:
            view = view[self._link.send(view, flags) :]

    def send_while_taken(self, views: deque[memoryview], pause_s: float) -> None:
        """Say of these what the other end takes, until it takes nothing for so long, and leave the rest there."""
        self._link.settimeout(pause_s)
        with suppress(TimeoutError):
            while views:
                views[0] = views[0][self._link.send(views[0], _MORE if len(views) > 1 else 0) :]
                if not views[0]:
                    views.popleft()

    def send_some(self, view: memoryview) -> int:
        """Say as much of it as the link takes now; how many bytes that is."""
        return self._link.send(view)

    def receive_some(self, view: memoryview, flags: int = 0) -> int:
        """Fill as much of it as is there; how many bytes that is."""
        fresh = self._link.recv_into(view, 0, flags)
        if fresh == 0:
            raise ConnectionError("it has hung up")
        return fresh

    def receive_while_it_comes(self, cursor: "Cursor", lull_s: float, turn_s: float) -> None:
        """Hear what there is room for, until nothing comes for `lull_s`, and for no longer than `turn_s`."""
        until = time.monotonic() + turn_s
        self._link.settimeout(lull_s)
        try:
            while cursor.view and time.monotonic() < until:
                cursor.advance(self.receive_some(cursor.view))
        except TimeoutError as error:
            if error.errno is not None:  # not ours: that of a host that is silent
                raise

    def receive(self, most: Mapping[Kind, int], timeout_s: float | None = None) -> Message:
        """Hear the next message, whole within so long; `most` are the bytes that one of each awaited kind may have.

        ConnectionError where the other end is gone, TimeoutError where it is late, FrameError where it says anything
        else.
        """
        message: Message = self.fill(Cursor(rooms_of_message(most)), timeout_s)
        return message

    def receive_bytes(self, num_bytes: int) -> Tensor:
        """The next bytes; where there is no timeout the kernel waits for all, and Python wakes up once."""
        received = torch.empty(num_bytes, dtype=torch.uint8)
        self.fill(Cursor(iter([received.numpy().data])), None)
        return received

    def fill(self, cursor: "Cursor", timeout_s: float | None) -> Any:
        """Hear all that there is room for, within so long; what its end found."""
        if timeout_s is None:
            while cursor.view:
                cursor.advance(self.receive_some(cursor.view, socket.MSG_WAITALL))
            return cursor.found
        until = time.monotonic() + timeout_s
        before = self._link.gettimeout()
        try:
            while cursor.view:
                self._link.settimeout(max(until - time.monotonic(), _A_MOMENT_S))
                cursor.advance(self.receive_some(cursor.view))
        finally:
            self._link.settimeout(before)
        return cursor.found

    def shut_down(self) -> None:
        """End it for both; a thread that waits on it finds that out."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back, once what was said is on its way."""
        self._link.close()
        if self._relay is not None:
            self._relay.join(_GOODBYE_S)


class Cursor:
    """How far one has come in memory that is to be sent, or to be filled."""

    def __init__(self, rooms: Iterator[memoryview]) -> None:
        self._rooms = rooms
        self.view = memoryview(b"")  # what comes next; empty at the end
        self.found: Any = None  # what a generator of rooms returns then
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        self.view = self.view[num_bytes:]
        while not self.view:
            try:
                self.view = next(self._rooms)
            except StopIteration as end:
                self.found = self.found or end.value
                return


def views_of(message: Message) -> list[memoryview]:
    """What is sent of a message: its head, and its payload if it has one."""
    payload = message.payload
    head = _HEAD.pack(
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
    return [memoryview(head)] + ([payload.view(torch.uint8).numpy().data] if payload.nbytes else [])


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


class Acceptor:
    """Where others call this process: on the interface that Gloo was told, or at its address towards MASTER_ADDR.

    Who calls is challenged, and shows in a few bytes that it knows the key, before it may say anything else; then this
    end shows the same. The key is made of the address's token, which is told where workers meet, and LACONIC_SECRET.
    """

    def __init__(self, backlog: int) -> None:
        self._token = secrets.token_hex(16)
        self._key = _key(self._token)
        self._context = certificate(accepts=True)
        self._is_open = True
        try:
            host = _own_host()
            self._link = _listening(host, backlog)
        except OSError as error:
            raise LaunchError(
                f"this process finds no address at which others could call it ({error.strerror or error}); {_CURE}"
            ) from None

    @property
    def address(self) -> Address:
        host, port = self._link.getsockname()[:2]
        return Address(host, port, self._token)

    def accept(self, ranks: Collection[int], timeout_s: float) -> dict[int, tuple[Connection, str]]:
        """The connection and terms of each of these that has greeted within so long; strangers are closed.

        All greet at once, so that none waits for another. What is waited for on those connections has no timeout.
        """
        accepted: dict[int, tuple[Connection, str]] = {}
        greetings: dict[Connection, tuple[Cursor, float]] = {}  # and until when; the oldest comes first
        until = time.monotonic() + timeout_s
        self._link.settimeout(0)
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._link, selectors.EVENT_READ)
            while self._is_open and len(accepted) < len(ranks) and time.monotonic() < until:
                ready = {key.fileobj for key, _ in waiting.select(_LOOK_S)}
                now = time.monotonic()
                if self._link in ready:
                    with suppress(OSError):  # it has hung up already
                        caller = Connection(self._link.accept()[0], 0, self._context)
                        greetings[caller] = Cursor(self._greeting(caller)), now + _GREETING_S
                        waiting.register(caller, selectors.EVENT_READ)
                for connection, (cursor, end) in list(greetings.items()):
                    try:
                        if connection in ready:
                            cursor.advance(connection.receive_some(cursor.view))
                        if cursor.view and now < end and len(greetings) <= _MOST_GREETINGS:
                            continue
                        rank, terms = cursor.found or (-1, "")
                    except (OSError, FrameError, ValueError):
                        rank = -1
                    waiting.unregister(connection)
                    del greetings[connection]
                    if rank in ranks and rank not in accepted:
                        connection.set_timeout(None)
                        accepted[rank] = connection, terms
                    else:
                        connection.close()
        for connection in greetings:
            connection.close()
        return accepted

    def _greeting(self, connection: Connection) -> Generator[memoryview, None, tuple[int, str]]:
        """Room for what a caller has to say; its rank and terms."""
        challenge = secrets.token_bytes(_NONCE_BYTES)
        connection.send_some(memoryview(challenge))
        said = bytearray(_PROOF.size)
        yield memoryview(said)
        rank, nonce, proof = _PROOF.unpack(said)
        if not hmac.compare_digest(proof, _proof(self._key, b"calls", challenge, nonce, rank)):
            raise FrameError("does not know the key")
        connection.send_some(memoryview(_proof(self._key, b"accepts", challenge, nonce, rank)))
        hello = yield from rooms_of_message({Kind.HELLO: _HELLO_BYTES})
        return rank, hello.text.decode()

    def stop(self) -> None:
        """Await nobody any more."""
        self._is_open = False

    def close(self) -> None:
        self._link.close()


def connect(address: Address, rank: int, whom: str, timeout_s: float, terms: str = "") -> Connection:
    """A connection to an acceptor, greeted as `rank` within so long; what is waited for on it has no timeout."""
    where = f"{whom} at {address.host}:{address.port}"
    until = time.monotonic() + timeout_s
    connection = None
    context = certificate(accepts=False)
    try:
        connection = Connection(socket.create_connection((address.host, address.port), timeout_s), None, context)
        challenge, proof = bytearray(_NONCE_BYTES), bytearray(_PROOF_BYTES)
        connection.fill(Cursor(iter([memoryview(challenge)])), until - time.monotonic())
        nonce = secrets.token_bytes(_NONCE_BYTES)
        key = _key(address.token)
        mine = _proof(key, b"calls", challenge, nonce, rank)
        connection.send_some(memoryview(_PROOF.pack(rank, nonce, mine)))
        with suppress(ConnectionError):  # so it turns away who does not know the key
            connection.fill(Cursor(iter([memoryview(proof)])), until - time.monotonic())
        if not hmac.compare_digest(proof, _proof(key, b"accepts", challenge, nonce, rank)):
            connection.close()
            raise LaunchError(f"rank {rank} and {where} do not know the same secret; give all ranks one LACONIC_SECRET")
        connection.send(Message(Kind.HELLO, payload=payload_of(terms.encode())))
    except OSError as error:
        if connection is not None:
            connection.close()
        raise LaunchError(f"rank {rank} cannot reach {where} ({error.strerror or error}); {_CURE}") from None
    return connection


def _key(token: str) -> bytes:
    """What both ends know, and nobody who overhears the token alone."""
    return hmac.digest(os.environ.get("LACONIC_SECRET", "").encode(), token.encode(), "sha256")


def _proof(key: bytes, end: bytes, challenge: bytes | bytearray, nonce: bytes, rank: int) -> bytes:
    """What only who knows the key can say of these; the two ends say different things."""
    return hmac.digest(key, b"".join([end, challenge, nonce, rank.to_bytes(4, "little")]), "sha256")


def meet(
    rank: int, tell_all: TellAll, *, calls: Collection[int], awaits: Collection[int]
) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Connections to those whom this worker calls, and from those it awaits; a call that all workers make.

    Where one of them cannot, all of them get its LaunchError, and nothing is left open.
    """
    to: dict[int, Connection] = {}
    of: dict[int, Connection] = {}
    acceptor = None
    try:
        acceptor = Acceptor(len(awaits))
        card: object = acceptor.address
    except LaunchError as error:
        card = str(error)[:_REASON_CHARACTERS]
    addresses = _told(tell_all, card)
    failed = ""
    assert acceptor is not None
    with ThreadPoolExecutor(1) as door:  # those who are called may be calling, too
        accepting = door.submit(acceptor.accept, awaits, _MEET_TIMEOUT_S)
        try:
            for peer in calls:
                to[peer] = connect(Address(*addresses[peer]), rank, f"rank {peer}", _MEET_TIMEOUT_S)
        except LaunchError as error:
            failed = str(error)[:_REASON_CHARACTERS]
            acceptor.stop()
        of.update({peer: link for peer, (link, _) in accepting.result().items()})
    if not failed and (late := set(awaits) - of.keys()):
        failed = f"rank {min(late)} has not called rank {rank} for {_MEET_TIMEOUT_S:g} s; {_CURE}"
    acceptor.close()
    try:
        _told(tell_all, failed)
    except LaunchError:
        for link in (*to.values(), *of.values()):
            link.close()
        raise
    return to, of


def _told(tell_all: TellAll, mine: object) -> list[Any]:
    """What each worker says, by rank; LaunchError where one says why it cannot: a text."""
    everyone = tell_all(payload_of(json.dumps(mine).encode().ljust(_CARD_BYTES)))
    told = [json.loads(bytes(row.tolist())) for row in everyone]
    for one in told:
        if isinstance(one, str) and one:
            raise LaunchError(one)
    return told


def _listening(host: str, backlog: int) -> socket.socket:
    """A socket on a port that is free, or on the first free one of LACONIC_PORTS."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    *others, last = _ports()
    for port in others:
        with suppress(OSError):
            return socket.create_server((host, port), family=family, backlog=backlog)
    return socket.create_server((host, last), family=family, backlog=backlog)


def _ports() -> range:
    """Those that others may call this process at; 0 alone: any."""
    first, _, last = os.environ.get("LACONIC_PORTS", "0-0").partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 65_536):
        raise LaunchError("LACONIC_PORTS is no range of ports; write it as 20000-20099")
    return range(int(first), int(last) + 1)


def _own_host() -> str:
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


def longest_message(model: Collection[Tensor] = ()) -> int:
    """Bytes that no message about these tensors exceeds: wide values and places, names, a few numbers."""
    return sum(16 * tensor.numel() + 4096 for tensor in model) + (1 << 20)


def payload_of(text: bytes) -> Tensor:
    """Bytes as a message carries them."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _NOTHING
