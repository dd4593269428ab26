"""Bytes to and from several sockets at once, in calls that leave the interpreter to others."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.kernels.cpu.library import ROOM, library

LATE, TOO_LONG = -1, -2  # as in native/exchange.cpp; other errors are the system's
ADDED = {  # as in native/hops.cpp
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.uint8: 3,
    torch.int8: 3,
    torch.int16: 4,
    torch.int32: 5,
    torch.int64: 6,
}
_HEAD_BYTES = 8


@dataclass(frozen=True)
class Moved:
    """How far a call has come, by socket: 0 or the error of socket `failed`, bytes that are left, and what came."""

    error: int
    failed: int
    out_left: Sequence[int]
    in_left: Sequence[int]
    lengths: Sequence[int] = ()  # of messages that came, -1 where that is not known
    messages: Sequence[Tensor] = ()

    def is_over(self, at: int) -> bool:
        return not self.out_left[at] and not self.in_left[at]


def exchange(
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
    error = library().laconic_exchange(
        len(sockets), numbers.ctypes.data, *rows, in_pieces, timeout_ms, ctypes.byref(failed)
    )
    _, out_left, _, in_left = views.tolist()
    return Moved(error, failed.value, out_left, in_left)


def deal(
    sockets: Sequence[int], messages: Sequence[Tensor], longest: Sequence[int], usual: int, timeout_ms: int
) -> Moved:
    """Send messages (bytes), each behind its length, and receive as many, each of at most so many bytes.

    One of up to `usual` bytes finds room without a word.
    """
    rooms = [torch.empty(min(usual, most), dtype=torch.uint8) for most in longest]

    def make_room(at: int, length: int) -> int:
        rooms[at] = torch.empty(length, dtype=torch.uint8)
        return rooms[at].data_ptr()

    of_messages = [(message.data_ptr(), message.numel()) for message in messages]
    of_rooms = [(room.data_ptr(), _HEAD_BYTES, room.numel()) for room in rooms]
    told = zip(of_messages, of_rooms, longest, strict=True)
    table = np.array([(*message, *room, most, -1) for message, room, most in told], dtype=np.int64).T.copy()
    numbers = np.array(sockets, dtype=np.int32)
    failed = ctypes.c_int64()
    out, out_left, into, in_left, sizes, most, lengths = (row.ctypes.data for row in table)
    views = numbers.ctypes.data, out, out_left, into, in_left, sizes, most
    error = library().laconic_deal(len(sockets), *views, ROOM(make_room), lengths, timeout_ms, ctypes.byref(failed))
    _, out_bytes, _, in_bytes, _, _, found = table.tolist()
    heard = [room[:length] for room, length in zip(rooms, found, strict=True)]
    return Moved(error, failed.value, out_bytes, in_bytes, found, heard)


def add_up_(vector: Tensor, rank: int, sockets: Sequence[int], timeout_ms: int) -> tuple[int, int, bool]:
    """Both hops of a sum over all workers; 0 or the error of which of them, and whether that one said anything."""
    failed = ctypes.c_int64()
    has_moved = ctypes.c_int()
    error = library().laconic_add_up(
        vector.data_ptr(),
        vector.numel(),
        ADDED[vector.dtype],
        rank,
        len(sockets),
        (ctypes.c_int32 * len(sockets))(*sockets),
        timeout_ms,
        ctypes.byref(failed),
        ctypes.byref(has_moved),
    )
    return error, failed.value, bool(has_moved.value)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view else 0
