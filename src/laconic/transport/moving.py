"""Bytes to and from several connections at once: natively, where that is built, or by Python."""

import ctypes
import os
import select
from collections.abc import Iterator, Mapping

import numpy as np

from laconic.errors import PeerError
from laconic.kernels.cpu.library import level, library
from laconic.transport.connection import Connection, Cursor

_SILENCE = -1  # as in kernels/native/exchange.cpp


class Flow:
    """What goes to a peer and what comes from it."""

    def __init__(self, link: Connection, out: Iterator[memoryview], into: Iterator[memoryview]) -> None:
        self.link = link
        self.out = Cursor(out)
        self.into = Cursor(into)

    @property
    def is_through(self) -> bool:
        return not self.out.view and not self.into.view


def move(flows: Mapping[int, Flow], timeout_s: float, *, until_any: bool) -> None:
    """Send and receive what comes next, all of it or until any of it is through; PeerError names who fails."""
    if level() is not None:
        _move_natively(flows, timeout_s, until_any)
    else:
        _move(flows, timeout_s)


def _move_natively(flows: Mapping[int, Flow], timeout_s: float, until_any: bool) -> None:
    """In one call, which leaves the interpreter to others."""
    sockets = np.array([flow.link.fileno() for flow in flows.values()], dtype=np.int32)
    ends = [(flow.out.view, flow.into.view) for flow in flows.values()]
    views = np.array([[_address(o), len(o), _address(i), len(i)] for o, i in ends], dtype=np.int64).T.copy()
    before = views.copy()
    failed = ctypes.c_int64()
    rows = [row.ctypes.data for row in views]
    error = library().laconic_exchange(
        len(flows), sockets.ctypes.data, *rows, until_any, round(1e3 * min(timeout_s, 1e6)), ctypes.byref(failed)
    )
    if error == _SILENCE:
        raise _silent(flows, timeout_s)
    if error:
        raise _gone(list(flows)[failed.value], OSError(error, os.strerror(error)))
    for flow, (_, sent, _, received) in zip(flows.values(), (before - views).T.tolist(), strict=True):
        flow.out.advance(sent)
        flow.into.advance(received)


def _move(flows: Mapping[int, Flow], timeout_s: float) -> None:
    """A piece of it, at most: whoever wants more calls again."""
    waiting = select.poll()
    by_socket = {flow.link.fileno(): (peer, flow) for peer, flow in flows.items()}
    for socket, (_, flow) in by_socket.items():
        waiting.register(socket, (select.POLLOUT if flow.out.view else 0) | (select.POLLIN if flow.into.view else 0))
    ready = waiting.poll(1e3 * timeout_s)
    if not ready:
        raise _silent(flows, timeout_s)
    for socket, events in ready:
        peer, flow = by_socket[socket]
        try:
            if flow.out.view and events & (select.POLLOUT | select.POLLERR):
                flow.out.advance(flow.link.send_some(flow.out.view))
            if flow.into.view and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                flow.into.advance(flow.link.receive_some(flow.into.view))
        except BlockingIOError:
            pass
        except OSError as error:
            raise _gone(peer, error) from None


def _silent(flows: Mapping[int, Flow], timeout_s: float) -> PeerError:
    return PeerError(f"rank {min(flows)} has said nothing for {timeout_s:g} s; see what it says there")


def _gone(peer: int, error: OSError) -> PeerError:
    return PeerError(f"rank {peer} is gone, or gave up this step ({error.strerror or error}); see what it says")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view else 0
