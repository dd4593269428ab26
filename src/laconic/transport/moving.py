"""Bytes to and from several connections at once: natively, where that is built, or by Python."""

import ctypes
import math
import os
import select
import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from laconic.errors import PeerError
from laconic.kernels.cpu.library import level, library
from laconic.transport.connection import Connection, Cursor

_LATE = -1  # as in kernels/native/exchange.cpp
_ADDED = {  # as in kernels/native/hops.cpp
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.uint8: 3,
    torch.int8: 3,
    torch.int16: 4,
    torch.int32: 5,
    torch.int64: 6,
}


class Deadline:
    """When a message must be whole, however much of it comes meanwhile: a byte a second holds nobody up for ever."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

    @property
    def left_ms(self) -> int:
        """Until then; 0 from then on."""
        return max(0, math.ceil(1e3 * min(self._until - time.monotonic(), 1e6)))


class Flow:
    """What goes to a peer and what comes from it."""

    def __init__(self, link: Connection, out: Iterator[memoryview], into: Iterator[memoryview]) -> None:
        self.link = link
        self.out = Cursor(out)
        self.into = Cursor(into)
        self.has_moved = False

    def advance(self, sent: int, received: int) -> None:
        """So many bytes have crossed."""
        self.has_moved |= received > 0
        self.out.advance(sent)
        self.into.advance(received)

    @property
    def is_through(self) -> bool:
        return not self.out.view and not self.into.view


def move(flows: Mapping[int, Flow], deadline: Deadline, *, until_any: bool) -> None:
    """Send and receive what comes next, all of it or until any of it is through; PeerError names who fails."""
    if level() is not None:
        _move_natively(flows, deadline, until_any)
    else:
        _move(flows, deadline)


def adds_natively(dtype: torch.dtype) -> bool:
    """Whether `add_up_` knows a type; others are added by torch, to the same bits."""
    return level() is not None and dtype in _ADDED


def add_up_(vector: Tensor, rank: int, links: Mapping[int, Connection], timeout_s: float) -> None:
    """Both hops of a sum over all workers, each with a deadline; PeerError names who fails."""
    num_workers = len(links) + 1
    sockets = [links[peer].fileno() if peer != rank else -1 for peer in range(num_workers)]
    failed = ctypes.c_int64()
    has_moved = ctypes.c_int()
    error = library().laconic_add_up(
        vector.data_ptr(),
        vector.numel(),
        _ADDED[vector.dtype],
        rank,
        num_workers,
        (ctypes.c_int32 * num_workers)(*sockets),
        Deadline(timeout_s).left_ms,
        ctypes.byref(failed),
        ctypes.byref(has_moved),
    )
    if error == _LATE:
        raise _late(failed.value, timeout_s, has_moved=bool(has_moved.value))
    if error:
        raise _gone(failed.value, OSError(error, os.strerror(error)))


def _move_natively(flows: Mapping[int, Flow], deadline: Deadline, until_any: bool) -> None:
    """In one call, which leaves the interpreter to others."""
    sockets = np.array([flow.link.fileno() for flow in flows.values()], dtype=np.int32)
    ends = [(flow.out.view, flow.into.view) for flow in flows.values()]
    views = np.array([[_address(o), len(o), _address(i), len(i)] for o, i in ends], dtype=np.int64).T.copy()
    before = views.copy()
    failed = ctypes.c_int64()
    rows = [row.ctypes.data for row in views]
    error = library().laconic_exchange(
        len(flows), sockets.ctypes.data, *rows, until_any, deadline.left_ms, ctypes.byref(failed)
    )
    if error not in (0, _LATE):
        raise _gone(list(flows)[failed.value], OSError(error, os.strerror(error)))
    for flow, (_, sent, _, received) in zip(flows.values(), (before - views).T.tolist(), strict=True):
        flow.advance(sent, received)
    if error == _LATE:
        raise _late_of(flows, deadline)


def _move(flows: Mapping[int, Flow], deadline: Deadline) -> None:
    """A piece of it, at most: whoever wants more calls again."""
    waiting = select.poll()
    by_socket = {flow.link.fileno(): (peer, flow) for peer, flow in flows.items()}
    for socket, (_, flow) in by_socket.items():
        waiting.register(socket, (select.POLLOUT if flow.out.view else 0) | (select.POLLIN if flow.into.view else 0))
    ready = waiting.poll(deadline.left_ms)
    if not ready:
        raise _late_of(flows, deadline)
    for socket, events in ready:
        peer, flow = by_socket[socket]
        try:
            if flow.out.view and events & (select.POLLOUT | select.POLLERR):
                flow.advance(flow.link.send_some(flow.out.view), 0)
            if flow.into.view and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                flow.advance(0, flow.link.receive_some(flow.into.view))
        except BlockingIOError:
            pass
        except OSError as error:
            raise _gone(peer, error) from None


def _late_of(flows: Mapping[int, Flow], deadline: Deadline) -> PeerError:
    peer = min(peer for peer, flow in flows.items() if not flow.is_through)
    return _late(peer, deadline.timeout_s, has_moved=flows[peer].has_moved)


def _late(peer: int, timeout_s: float, *, has_moved: bool) -> PeerError:
    what = "is not through with a message after" if has_moved else "has said nothing for"
    return PeerError(f"rank {peer} {what} {timeout_s:g} s; see what it says there")


def _gone(peer: int, error: OSError) -> PeerError:
    return PeerError(f"rank {peer} is gone, or gave up this step ({error.strerror or error}); see what it says")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view else 0
