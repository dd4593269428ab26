"""Processes connect: a caller proves that it knows a secret before anything else of it is read."""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from laconic.errors import FrameError, LaunchError
from laconic.transport.connection import Connection, Cursor, Kind, Message, payload_of, rooms_of_message
from laconic.transport.interfaces import address_of
from laconic.transport.tls import certificate

Gather = Callable[[Tensor], Tensor]  # one worker's bytes -> everyone's, by rank

HANDSHAKE_S = 10.0  # for a caller to show who it is; strangers may send anything, or nothing
_MOST_HANDSHAKES = 256  # at once: beyond, the oldest is closed
_LOOK_S = 0.2  # at most between two looks at the clock
_HELLO_BYTES = 65_536
_NONCE_BYTES = _PROOF_BYTES = 32
_PROOF = struct.Struct("<I32s32s")  # who calls, its nonce, its proof
_CONNECT_TIMEOUT_S = 60.0  # between two that have just exchanged addresses
_CARD_BYTES = 2048  # of a worker's address, or of the reason why it has none
_REASON_CHARACTERS = 300  # of which JSON may make six bytes each
_TLS_CURE = "give all ranks a LACONIC_TLS_CERT that holds, or has signed, those of the others, and LACONIC_TLS_KEY"
_CURE = "set GLOO_SOCKET_IFNAME to the interface that joins your machines"


class Address(NamedTuple):
    """The place where a process can be called, the token of its callers, and whether it shows a certificate."""

    host: str
    port: int
    token: str
    has_tls: bool = False

    @classmethod
    def by_hand(cls, host: str, port: int) -> Address:
        """One that a user gave: without a token, and under TLS where this process has a certificate."""
        return cls(host, port, "", certificate(accepts=False) is not None)


class Acceptor:
    """The socket at which others call this process: on Gloo's interface, or at its address towards MASTER_ADDR.

    A caller is challenged, and shows in a few bytes that it knows the key, before it may send anything else; then this
    end shows the same. The key is made of the address's token, which workers exchange beforehand, and LACONIC_SECRET.
    """

    def __init__(self, backlog: int, at: tuple[str, int] | None = None) -> None:
        self._token = secrets.token_hex(16) if at is None else ""  # who is given an address by hand has no token
        self._key = _key(self._token)
        self._context = certificate(accepts=True)
        self._is_open = True
        try:
            if at is None:
                self._link = _listening(_own_host(), backlog)
            else:
                family = socket.AF_INET6 if ":" in at[0] else socket.AF_INET
                self._link = socket.create_server(at, family=family, backlog=backlog)
        except OSError as error:
            if at is not None:
                raise LaunchError(
                    f"cannot listen at {at[0]}:{at[1]} ({os.strerror(error.errno or 0)}); give another address"
                ) from None
            raise LaunchError(
                f"this process finds no address at which others could call it ({error.strerror or error}); {_CURE}"
            ) from None

    @property
    def address(self) -> Address:
        host, port = self._link.getsockname()[:2]
        return Address(host, port, self._token, self._context is not None)

    def accept(self, ranks: Collection[int], timeout_s: float) -> dict[int, tuple[Connection, str]]:
        """The connection and terms of each of these whose handshake ends within so long; strangers are closed.

        Handshakes happen side by side, so that none waits for another. The connections have no timeout.
        """
        accepted: dict[int, tuple[Connection, str]] = {}
        handshakes: dict[Connection, tuple[Cursor, float]] = {}  # and until when; the oldest comes first
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
                        handshakes[caller] = Cursor(self._handshake(caller)), now + HANDSHAKE_S
                        waiting.register(caller, selectors.EVENT_READ)
                for connection, (cursor, end) in list(handshakes.items()):
                    try:
                        if connection in ready:
                            cursor.advance(connection.receive_some(cursor.view))
                        if cursor.view and now < end and len(handshakes) <= _MOST_HANDSHAKES:
                            continue
                        rank, terms = cursor.result or (-1, "")
                    except (OSError, FrameError, ValueError):
                        rank = -1
                    waiting.unregister(connection)
                    del handshakes[connection]
                    if rank in ranks and rank not in accepted:
                        connection.set_timeout(None)
                        accepted[rank] = connection, terms
                    else:
                        connection.close()
        for connection in handshakes:
            connection.close()
        return accepted

    def accept_next(self) -> tuple[Connection, str]:
        """The next caller, before its handshake, and where it calls from; OSError once this is closed."""
        self._link.settimeout(None)
        link, (host, port, *_) = self._link.accept()
        return Connection(link, HANDSHAKE_S, self._context), f"{host}:{port}"

    def shake_hands(self, connection: Connection) -> None:
        """Let a caller show that it knows the key; OSError or FrameError where it does not, in time."""
        connection.fill(Cursor(self._handshake(connection)), HANDSHAKE_S)
        connection.set_timeout(None)

    def _handshake(self, connection: Connection) -> Generator[memoryview, None, tuple[int, str]]:
        """Room for what a caller has to send; its rank and terms."""
        challenge = secrets.token_bytes(_NONCE_BYTES)
        connection.send_some(memoryview(challenge))
        shown = bytearray(_PROOF.size)
        yield memoryview(shown)
        rank, nonce, proof = _PROOF.unpack(shown)
        if not hmac.compare_digest(proof, _proof(self._key, b"calls", challenge, nonce, rank)):
            raise FrameError("does not know the key")
        connection.send_some(memoryview(_proof(self._key, b"accepts", challenge, nonce, rank)))
        hello = yield from rooms_of_message({Kind.HELLO: _HELLO_BYTES})
        return rank, hello.text.decode()

    def stop(self) -> None:
        """Accept nobody any more."""
        self._is_open = False

    def close(self) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # so that a thread that waits for callers finds that out
        self._link.close()


def connect(
    address: Address, rank: int, whom: str, timeout_s: float, terms: str = "", *, caller: str = "", cure: str = _CURE
) -> Connection:
    """A connection to an acceptor, after a handshake as `rank` within so long; it has no timeout.

    Errors name the two ends `caller` and `whom`, and say what to do where they do not reach each other.
    """
    caller = caller or f"rank {rank}"
    where = f"{whom} at {address.host}:{address.port}"
    until = time.monotonic() + timeout_s
    connection = None
    context = certificate(accepts=False)
    if address.has_tls != (context is not None):
        raise LaunchError(f"one of {caller} and {where} has no certificate; {_TLS_CURE}")
    try:
        connection = Connection(socket.create_connection((address.host, address.port), timeout_s), None, context)
        challenge, proof = bytearray(_NONCE_BYTES), bytearray(_PROOF_BYTES)
        try:
            connection.fill(Cursor([memoryview(challenge)]), until - time.monotonic())
        except ConnectionError:
            if context is None:
                raise
            connection.close()
            raise LaunchError(f"{caller} and {where} refuse each other's certificate; {_TLS_CURE}") from None
        nonce = secrets.token_bytes(_NONCE_BYTES)
        key = _key(address.token)
        own_proof = _proof(key, b"calls", challenge, nonce, rank)
        connection.send_some(memoryview(_PROOF.pack(rank, nonce, own_proof)))
        with suppress(ConnectionError):  # so an acceptor ends a handshake with a caller that does not know the key
            connection.fill(Cursor([memoryview(proof)]), until - time.monotonic())
        if not hmac.compare_digest(proof, _proof(key, b"accepts", challenge, nonce, rank)):
            connection.close()
            raise LaunchError(f"{caller} and {where} do not know the same secret; give both ends one LACONIC_SECRET")
        connection.send(Message(Kind.HELLO, payload=payload_of(terms.encode())))
    except OSError as error:
        if connection is not None:
            connection.close()
        raise LaunchError(f"{caller} cannot reach {where} ({error.strerror or error}); {cure}") from None
    return connection


def _key(token: str) -> bytes:
    """The key that both ends know, and nobody who overhears the token alone."""
    return hmac.digest(os.environ.get("LACONIC_SECRET", "").encode(), token.encode(), "sha256")


def _proof(key: bytes, end: bytes, challenge: bytes | bytearray, nonce: bytes, rank: int) -> bytes:
    """The proof that only an end with the key can make of these; the two ends show different things."""
    return hmac.digest(key, b"".join([end, challenge, nonce, rank.to_bytes(4, "little")]), "sha256")


def open_connections(
    rank: int,
    gather: Gather,
    *,
    calls: Collection[int],
    awaits: Collection[int],
    timeout_s: float,
    names: Sequence[int],
) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Connections to the ranks that this worker calls, and from those it awaits; a call that all workers make.

    Where one of them cannot, all of them get its LaunchError as soon as it knows, and nothing is left open. `names`
    are the ranks in the world, `timeout_s` is how long `gather` waits, in which all of this has its end.
    """
    to: dict[int, Connection] = {}
    of: dict[int, Connection] = {}
    acceptor = None
    try:
        acceptor = Acceptor(len(awaits))
        card: object = acceptor.address
    except LaunchError as error:
        card = str(error)[:_REASON_CHARACTERS]
    addresses = _gathered(gather, card, rank)
    assert acceptor is not None
    until = time.monotonic() + min(_CONNECT_TIMEOUT_S, timeout_s / 2)
    failure = ""
    try:
        with ThreadPoolExecutor(1) as beside:  # those that are called may be calling, too
            accepting = beside.submit(acceptor.accept, awaits, until - time.monotonic())
            try:
                for peer in calls:
                    whom, left_s = f"rank {names[peer]}", max(0.0, until - time.monotonic())
                    to[peer] = connect(Address(*addresses[peer]), rank, whom, left_s, caller=f"rank {names[rank]}")
            except LaunchError as error:
                failure = str(error)[:_REASON_CHARACTERS]
            try:
                _gathered(gather, failure, rank)  # callers know first: nobody waits for one that was refused
            except BaseException:
                acceptor.stop()
                raise
            of.update({peer: link for peer, (link, _) in accepting.result().items()})
        if missing := set(awaits) - of.keys():
            failure = f"rank {names[min(missing)]} has not called rank {names[rank]} in time; {_CURE}"
        _gathered(gather, failure, rank)
    except BaseException:
        for link in (*to.values(), *of.values(), *(link for link, _ in accepting.result().values())):
            link.close()
        raise
    finally:
        acceptor.close()
    for peer, link in (*to.items(), *of.items()):
        link.world_rank = names[peer]
    return to, of


def _gathered(gather: Gather, own: object, rank: int) -> list[Any]:
    """The card of each worker, by rank; LaunchError where one is a text: the reason why its worker cannot."""
    cards = [json.loads(bytes(row.tolist())) for row in gather(payload_of(json.dumps(own).encode().ljust(_CARD_BYTES)))]
    for card in cards:
        if isinstance(card, str) and card:
            raise LaunchError(card, is_repeated=rank > 0)
    return cards


def _listening(host: str, backlog: int) -> socket.socket:
    """A socket on a port that is free, or on the first free one of LACONIC_PORTS."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = _ports()
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise LaunchError(
        f"all ports of LACONIC_PORTS={ports[0]}-{ports[-1]} are taken at {host}; name more of them: each session takes "
        "one in every process"
    )


def _ports() -> range:
    """Those that others may call this process at; 0 alone: any."""
    first, _, last = os.environ.get("LACONIC_PORTS", "0-0").partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 65_536):
        raise LaunchError("LACONIC_PORTS is no range of ports; write it as 20000-20099")
    return range(int(first), int(last) + 1)


def _own_host() -> str:
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return address_of(name)
    towards = os.environ.get("MASTER_ADDR") or socket.gethostname()
    places = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)
    family, _, _, _, place = min(places, key=lambda place: place[0] != socket.AF_INET)  # IPv4 where there are both
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
