"""Bytes to and from several connections at once: natively, where that is built, or by Python."""

import ctypes
import math
import os
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from laconic.errors import FrameError, PeerError
from laconic.transport import sockets
from laconic.transport.connection import Connection, Cursor, Kind, Message, rooms_of_message, views_of
from laconic.transport.sockets import LENGTH_BYTES, OVERDUE, TOO_LONG


class Deadline:
    """The time until which a message must be whole: one that comes a byte a second holds nobody up for ever."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

    @property
    def left_ms(self) -> int:
        """Until then; 0 from then on."""
        return max(0, math.ceil(1e3 * min(self._until - time.monotonic(), 1e6)))


class Flow:
    """The bytes that go to a peer and those that come from it."""

    def __init__(self, link: Connection, out: Iterable[memoryview] = (), into: Iterable[memoryview] = ()) -> None:
        sockets.library()  # which is loaded now, and not when a first message is waited for
        self.link = link
        self.out = Cursor(out)
        self.sent_at = time.monotonic()  # when the peer last took something, or was first sent it
        self.receive_into(into)

    def send(self, message: Message) -> None:
        """Send this after what is on its way."""
        self.out.extend(views_of(message))
        self.sent_at = time.monotonic()

    def receive_into(self, into: Iterable[memoryview]) -> None:
        """Make room for what comes next."""
        self.into = Cursor(into)
        self.has_moved = False  # whether something of it has come

    def expect(self, most: Mapping[Kind, int]) -> None:
        """Make room for a message of one of these kinds and lengths, unless one has come, or begun to."""
        if self.into.result is None and not self.into.view:
            self.receive_into(rooms_of_message(most))

    def take(self) -> Message | None:
        """The message that has come whole, if one has."""
        message: Message | None = self.into.result
        self.into.result = None
        return message

    def advance(self, num_sent: int, num_received: int) -> None:
        """Note that so many bytes have crossed."""
        if num_sent:
            self.sent_at = time.monotonic()
        self.has_moved |= num_received > 0
        self.out.advance(num_sent)
        self.into.advance(num_received)

    @property
    def is_through(self) -> bool:
        return not self.out.view and not self.into.view


_Counts = dict[int, tuple[int, int]]  # peer -> bytes sent and received
_Failed = dict[int, Exception]


def move(flows: Mapping[int, Flow], deadline: Deadline) -> None:
    """Send and receive until all is through; PeerError names the peer that fails."""
    while flows := _unfinished(flows):
        if not deadline.left_ms:
            peer = min(flows)
            raise _overdue(_name(peer, flows[peer].link), deadline.timeout_s, has_moved=flows[peer].has_moved)
        for peer, error in _move(flows, deadline, in_pieces=False).items():
            raise _gone(_name(peer, flows[peer].link), error) if isinstance(error, OSError) else error


def move_some(flows: Mapping[int, Flow], timeout_s: float) -> _Failed:
    """Send and receive until a piece of one is through, or for so long; the errors of the peers that failed."""
    return _move(_unfinished(flows), Deadline(timeout_s), in_pieces=True)


def _unfinished(flows: Mapping[int, Flow]) -> dict[int, Flow]:
    return {peer: flow for peer, flow in flows.items() if not flow.is_through}


def _move(flows: Mapping[int, Flow], deadline: Deadline, *, in_pieces: bool) -> _Failed:
    native = sockets.library()
    counts, failed = _move_natively(native, flows, deadline, in_pieces) if native else _move_by_poll(flows, deadline)
    for peer, (num_sent, num_received) in counts.items():
        try:
            flows[peer].advance(num_sent, num_received)
        except FrameError as error:
            failed[peer] = error
    return failed


def all_to_all(
    links: Mapping[int, Connection],
    messages: Mapping[int, Tensor],
    longest: Mapping[int, int],
    usual: int,
    timeout_s: float,
) -> dict[int, Tensor]:
    """Each peer's message for this one's to it: bytes, of a length that only its sender knows, up to longest[peer].

    Room for one of up to `usual` bytes is made beforehand. FrameError names the peer whose length cannot be.
    """
    deadline = Deadline(timeout_s)
    native = sockets.library()
    if native and links:
        return _all_to_all_natively(native, links, messages, longest, usual, deadline)
    received: dict[int, Tensor] = {}
    flows = {
        peer: Flow(link, _with_length(messages[peer]), _of_any_length(peer, link, longest[peer], received))
        for peer, link in links.items()
    }
    move(flows, deadline)
    return received


def _with_length(message: Tensor) -> list[memoryview]:
    return [memoryview(bytearray(message.numel().to_bytes(LENGTH_BYTES, "little"))), message.numpy().data]


def _of_any_length(peer: int, link: Connection, longest: int, received: dict[int, Tensor]) -> Iterator[memoryview]:
    """Room for a length, then for as many bytes, which become received[peer]."""
    head = bytearray(LENGTH_BYTES)
    yield memoryview(head)
    length = int.from_bytes(head, "little", signed=True)
    _check_length(_name(peer, link), length, longest)
    received[peer] = torch.empty(length, dtype=torch.uint8)
    yield received[peer].numpy().data


def _check_length(peer: str, length: int, longest: int) -> None:
    if not 0 <= length <= longest:
        raise FrameError(f"a message from {peer} says it has {length} bytes of {longest}; nothing is applied")


def _name(peer: int, link: Connection) -> str:
    """A peer as errors name it: by its rank in the world, where that is known."""
    return f"rank {peer if link.world_rank is None else link.world_rank}"


def all_reduce_(vector: Tensor, rank: int, links: Mapping[int, Connection], timeout_s: float) -> bool:
    """Both hops of a sum over all workers, each with a deadline; False, and nothing done, without native code.

    PeerError names the peer that fails. A type that native code does not know is added by torch, to the same bits.
    """
    native = sockets.library()
    if native is None or vector.dtype not in sockets.ADDED:
        return False
    ends = [links[peer].fileno() if peer != rank else -1 for peer in range(len(links) + 1)]
    error, failed, has_moved = sockets.all_reduce_(native, vector, rank, ends, Deadline(timeout_s).left_ms)
    if error == OVERDUE:
        raise _overdue(_name(failed, links[failed]), timeout_s, has_moved=has_moved)
    if error:
        raise _gone(_name(failed, links[failed]), OSError(error, os.strerror(error)))
    return True


def _all_to_all_natively(
    native: ctypes.CDLL,
    links: Mapping[int, Connection],
    messages: Mapping[int, Tensor],
    longest: Mapping[int, int],
    usual: int,
    deadline: Deadline,
) -> dict[int, Tensor]:
    peers = list(links)
    ends = [link.fileno() for link in links.values()]
    outgoing, most = [messages[peer] for peer in peers], [longest[peer] for peer in peers]
    moved = sockets.all_to_all(native, ends, outgoing, most, usual, deadline.left_ms)
    names = [_name(peer, link) for peer, link in links.items()]
    if moved.error == TOO_LONG:
        _check_length(names[moved.failed], moved.lengths[moved.failed], most[moved.failed])
    if moved.error == OVERDUE:
        at = min((peer, at) for at, peer in enumerate(peers) if not moved.is_over(at))[1]
        has_moved = moved.lengths[at] >= 0 or moved.in_left[at] < LENGTH_BYTES
        raise _overdue(names[at], deadline.timeout_s, has_moved=has_moved)
    if moved.error:
        raise _gone(names[moved.failed], OSError(moved.error, os.strerror(moved.error)))
    return dict(zip(peers, moved.messages, strict=True))


def _move_natively(
    native: ctypes.CDLL, flows: Mapping[int, Flow], deadline: Deadline, in_pieces: bool
) -> tuple[_Counts, _Failed]:
    """Move what comes next of each."""
    ends = [flow.link.fileno() for flow in flows.values()]
    out, into = [flow.out.view for flow in flows.values()], [flow.into.view for flow in flows.values()]
    moved = sockets.exchange(native, ends, out, into, deadline.left_ms, in_pieces=in_pieces)
    failed: _Failed = {}
    if moved.error not in (0, OVERDUE):
        failed[list(flows)[moved.failed]] = OSError(moved.error, os.strerror(moved.error))
    sent = [len(view) - left for view, left in zip(out, moved.out_left, strict=True)]
    received = [len(view) - left for view, left in zip(into, moved.in_left, strict=True)]
    return dict(zip(flows, zip(sent, received, strict=True), strict=True)), failed


def _move_by_poll(flows: Mapping[int, Flow], deadline: Deadline) -> tuple[_Counts, _Failed]:
    """Move what each takes and has now."""
    waiting = select.poll()
    peers = {flow.link.fileno(): peer for peer, flow in flows.items()}
    for end, peer in peers.items():
        flow = flows[peer]
        waiting.register(end, (select.POLLOUT if flow.out.view else 0) | (select.POLLIN if flow.into.view else 0))
    counts: _Counts = {}
    failed: _Failed = {}
    for end, events in waiting.poll(deadline.left_ms):
        peer = peers[end]
        flow = flows[peer]
        num_sent = num_received = 0
        try:
            if flow.into.view and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                with suppress(BlockingIOError):
                    num_received = flow.link.receive_some(flow.into.view)
            if flow.out.view and events & (select.POLLOUT | select.POLLERR):
                with suppress(BlockingIOError):
                    num_sent = flow.link.send_some(flow.out.view)
        except OSError as error:
            failed[peer] = error
        counts[peer] = num_sent, num_received
    return counts, failed


def _overdue(peer: str, timeout_s: float, *, has_moved: bool) -> PeerError:
    what = "is not through with a message after" if has_moved else "has sent nothing for"
    return PeerError(f"{peer} {what} {timeout_s:g} s; see its log")


def _gone(peer: str, error: OSError) -> PeerError:
    return PeerError(f"{peer} is gone, or gave up this step ({error.strerror or error}); see its log")
