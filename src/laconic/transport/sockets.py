"""The native half of flows.py: bytes to and from several sockets at once, in calls that release the GIL."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laconic.errors import LaunchError

# The numbers of native/sockets.cpp; its other errors are the system's.
OVERDUE, TOO_LONG = -1, -2
ADDED = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.uint8: 3,
    torch.int8: 3,
    torch.int16: 4,
    torch.int32: 5,
    torch.int64: 6,
}
LENGTH_BYTES = 8  # before a message whose length only its sender knows
_INTERFACE = 1
_P, _N, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ROOM = ctypes.CFUNCTYPE(_P, _N, _N)  # where so many bytes from a socket are to go
_ARGUMENTS = {
    "exchange": (_N, _P, _P, _P, _P, _P, _INT, _INT, ctypes.POINTER(_N)),
    "all_to_all": (_N, _P, _P, _P, _P, _P, _P, _P, _ROOM, _P, _INT, ctypes.POINTER(_N)),
    "all_reduce": (_P, _N, _INT, _N, _N, _P, _INT, ctypes.POINTER(_N), ctypes.POINTER(_INT)),
}


@cache
def library() -> ctypes.CDLL | None:
    """The native library, or None where it was not built: everything here then happens in Python."""
    path = Path(__file__).with_name("native_sockets.so")
    if not path.exists():
        return None
    loaded = ctypes.CDLL(str(path))
    if loaded.laconic_transport_interface() != _INTERFACE:
        raise LaunchError(f"{path.name} was built from other sources than this code; reinstall laconic")
    for name, arguments in _ARGUMENTS.items():
        getattr(loaded, f"laconic_{name}").argtypes = arguments
    return loaded


@dataclass(frozen=True)
class Moved:
    """The progress of a call, by socket: 0 or the error of socket `failed`, bytes that are left, and what came."""

    error: int
    failed: int
    out_left: Sequence[int]
    in_left: Sequence[int]
    lengths: Sequence[int] = ()  # of messages that came, -1 where that is not known
    messages: Sequence[Tensor] = ()

    def is_over(self, at: int) -> bool:
        return not self.out_left[at] and not self.in_left[at]


def exchange(
    native: ctypes.CDLL,
    sockets: Sequence[int],
    out: Sequence[memoryview],
    into: Sequence[memoryview],
    timeout_ms: int,
    *,
    in_pieces: bool,
) -> Moved:
    """Send what is in `out`, and fill what is in `into`: all, or, in pieces, the first that is through."""
    views = np.array([[_address(o), len(o), _address(i), len(i)] for o, i in zip(out, into, strict=True)]).T.copy()
    numbers = np.array(sockets, dtype=np.int32)
    failed = ctypes.c_int64()
    rows = [row.ctypes.data for row in views]
    error = native.laconic_exchange(
        len(sockets), numbers.ctypes.data, *rows, in_pieces, timeout_ms, ctypes.byref(failed)
    )
    _, out_left, _, in_left = views.tolist()
    return Moved(error, failed.value, out_left, in_left)


def all_to_all(
    native: ctypes.CDLL,
    sockets: Sequence[int],
    messages: Sequence[Tensor],
    longest: Sequence[int],
    usual: int,
    timeout_ms: int,
) -> Moved:
    """Send messages (bytes), each behind its length, and receive as many, each of at most so many bytes.

    Room for one of up to `usual` bytes is made beforehand.
    """
    rooms = [torch.empty(min(usual, most), dtype=torch.uint8) for most in longest]

    def make_room(at: int, length: int) -> int:
        rooms[at] = torch.empty(length, dtype=torch.uint8)
        return rooms[at].data_ptr()

    outgoing = [(message.data_ptr(), message.numel()) for message in messages]
    incoming = [(room.data_ptr(), LENGTH_BYTES, room.numel()) for room in rooms]
    rows = [(*sent, *room, most, -1) for sent, room, most in zip(outgoing, incoming, longest, strict=True)]
    table = np.array(rows, dtype=np.int64).T.copy()
    numbers = np.array(sockets, dtype=np.int32)
    failed = ctypes.c_int64()
    *views, lengths = (row.ctypes.data for row in table)
    error = native.laconic_all_to_all(
        len(sockets), numbers.ctypes.data, *views, _ROOM(make_room), lengths, timeout_ms, ctypes.byref(failed)
    )
    _, out_left, _, in_left, _, _, received = table.tolist()
    messages_in = [room[:length] for room, length in zip(rooms, received, strict=True)]
    return Moved(error, failed.value, out_left, in_left, received, messages_in)


def all_reduce_(
    native: ctypes.CDLL, vector: Tensor, rank: int, sockets: Sequence[int], timeout_ms: int
) -> tuple[int, int, bool]:
    """Both hops of a sum over all workers; 0 or the error of which rank, and whether that one sent anything."""
    failed = ctypes.c_int64()
    has_moved = ctypes.c_int()
    numbers = (ctypes.c_int32 * len(sockets))(*sockets)
    entries = vector.data_ptr(), vector.numel(), ADDED[vector.dtype]
    ends = ctypes.byref(failed), ctypes.byref(has_moved)
    error = native.laconic_all_reduce(*entries, rank, len(sockets), numbers, timeout_ms, *ends)
    return error, failed.value, bool(has_moved.value)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view else 0
