"""Optional TLS under connections of our own: a thread between the wire and the socket that the rest of the code sees.

So everything else, native code too, goes on reading and writing a plain socket.
"""

import os
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from laconic.errors import LaunchError

_CHUNK_BYTES = 1 << 18


def has_tls() -> bool:
    """Return whether the user gave a certificate, so that nothing of ours may travel in clear."""
    return bool(os.environ.get("LACONIC_TLS_CERT") or os.environ.get("LACONIC_TLS_KEY"))


def is_guarded() -> bool:
    """Return whether the user gave a certificate or a secret, so that only those who prove it may take part."""
    return has_tls() or bool(os.environ.get("LACONIC_SECRET"))


def certificate(*, accepts: bool) -> ssl.SSLContext | None:
    """What the end that accepts, or the one that calls, shows and asks for; None where the user gave no certificate.

    Both ends show one, and take one that the file LACONIC_TLS_CERT holds, or that one in it has signed.
    """
    shown = os.environ.get("LACONIC_TLS_CERT", "")
    key = os.environ.get("LACONIC_TLS_KEY", "")
    if not has_tls():
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # addresses are exchanged by workers; the certificate shows who answers
    context.verify_mode = ssl.CERT_REQUIRED
    if not (shown and key):
        absent = "LACONIC_TLS_KEY" if shown else "LACONIC_TLS_CERT"
        raise LaunchError(f"{absent} is not set; name a certificate and its key, two PEM files, or neither")
    try:
        context.load_cert_chain(shown, key)
        context.load_verify_locations(shown)
    except OSError as error:
        raise LaunchError(
            f"LACONIC_TLS_CERT={shown} and LACONIC_TLS_KEY={key} are no certificate and key "
            f"({error.strerror or error}); name two PEM files, or unset both"
        ) from None
    return context


def secured(link: socket.socket, context: ssl.SSLContext) -> tuple[socket.socket, ssl.SSLSocket, threading.Thread]:
    """The plain end of TLS over `link`, its other end, and the thread between them."""
    plain, inner = socket.socketpair()
    link.setblocking(False)
    inner.setblocking(False)
    accepts = context.protocol == ssl.PROTOCOL_TLS_SERVER
    wire = context.wrap_socket(link, server_side=accepts, do_handshake_on_connect=False)
    thread = threading.Thread(target=_relay, args=(wire, inner), name="laconic-tls", daemon=True)
    thread.start()
    return plain, wire, thread


def _relay(wire: ssl.SSLSocket, plain: socket.socket) -> None:
    """Pass bytes on both ways until one end is closed, and then what is left."""
    outward = _Direction(plain.recv_into, wire.send)
    inward = _Direction(wire.recv_into, plain.send)
    with suppress(OSError), wire, plain:
        _shake_hands(wire, plain)
        while not inward.is_over and not (outward.is_over and not outward.waiting):
            is_moving = outward.move()
            is_moving |= inward.move()
            if not is_moving:
                _wait(wire, plain, outward, inward)


class _Direction:
    """One direction, a chunk at a time."""

    def __init__(self, read: Callable[[bytearray], int], write: Callable[[memoryview], int]) -> None:
        self._read = read
        self._write = write
        self._room = bytearray(_CHUNK_BYTES)
        self.waiting = memoryview(b"")
        self.is_over = False  # nothing more will be read

    def move(self) -> bool:
        """Read if nothing is waiting, and write what is; whether any of that could be done at once."""
        with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not self.waiting and not self.is_over:
                count = self._read(self._room)
                self.is_over = count == 0
                self.waiting = memoryview(self._room)[:count]
            elif not self.waiting:
                return False
            if self.waiting:
                self.waiting = self.waiting[self._write(self.waiting) :]
            return True
        return False


def _wait(wire: ssl.SSLSocket, plain: socket.socket, outward: _Direction, inward: _Direction) -> None:
    reads = select.POLLIN * (not outward.waiting and not outward.is_over)
    events = {
        wire: select.POLLIN * (not inward.waiting) | select.POLLOUT * bool(outward.waiting),
        plain: reads | select.POLLOUT * bool(inward.waiting),
    }
    waiting = select.poll()
    for link, event in events.items():
        if event:  # or a link that is closed would wake this up for ever
            waiting.register(link, event)
    waiting.poll()


def _shake_hands(wire: ssl.SSLSocket, plain: socket.socket) -> None:
    """Until both have shown who they are; ConnectionError if this end is closed before."""
    waiting = select.poll()
    waiting.register(plain, 0)
    while True:
        try:
            wire.do_handshake()
            return
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        waiting.register(wire, event)
        if any(link == plain.fileno() for link, _ in waiting.poll()):
            raise ConnectionError
