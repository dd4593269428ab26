"""Bytes to and from several connections at once: natively, where that is built, or by Python."""

import math
import os
import select
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FrameError, PeerError
from laconic.kernels.cpu import sockets
from laconic.kernels.cpu.library import level
from laconic.transport.connection import Connection, Cursor

_LENGTH_BYTES = 8  # before a message whose length only its sender knows


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

    def __init__(self, link: Connection, out: Iterable[memoryview] = (), into: Iterable[memoryview] = ()) -> None:
        self.link = link
        self.out = Cursor(())
        self.say(out)
        self.hear(into)

    def say(self, out: Iterable[memoryview]) -> None:
        """Send this after what is on its way."""
        self.out.extend(out)
        self.taken_at = time.monotonic()  # when something of that was last taken, or begun

    def hear(self, into: Iterable[memoryview]) -> None:
        """Make room for what comes next."""
        self.into = Cursor(into)
        self.has_moved = False  # whether something of it has come

    def take(self) -> Any:
        """What has come."""
        found, self.into.found = self.into.found, None
        return found

    def advance(self, sent: int, received: int) -> None:
        """So many bytes have crossed."""
        if sent:
            self.taken_at = time.monotonic()
        self.has_moved |= received > 0
        self.out.advance(sent)
        self.into.advance(received)

    @property
    def is_through(self) -> bool:
        return not self.out.view and not self.into.view


_Counts = dict[int, tuple[int, int]]  # peer -> bytes sent and received
_Failed = dict[int, Exception]


def move(flows: Mapping[int, Flow], deadline: Deadline) -> None:
    """Send and receive until all is through; PeerError names who fails."""
    while flows := _unfinished(flows):
        if not deadline.left_ms:
            peer = min(flows)
            raise _late(peer, deadline.timeout_s, has_moved=flows[peer].has_moved)
        for peer, error in _go_on(flows, deadline, in_pieces=False).items():
            raise _gone(peer, error) if isinstance(error, OSError) else error


def move_some(flows: Mapping[int, Flow], timeout_s: float) -> _Failed:
    """Send and receive until a piece of one is through, or for so long; how those failed who did."""
    return _go_on(_unfinished(flows), Deadline(timeout_s), in_pieces=True)


def _unfinished(flows: Mapping[int, Flow]) -> dict[int, Flow]:
    return {peer: flow for peer, flow in flows.items() if not flow.is_through}


def _go_on(flows: Mapping[int, Flow], deadline: Deadline, *, in_pieces: bool) -> _Failed:
    counts, failed = _move_natively(flows, deadline, in_pieces) if level() is not None else _move(flows, deadline)
    for peer, (sent, received) in counts.items():
        try:
            flows[peer].advance(sent, received)
        except FrameError as error:
            failed[peer] = error
    return failed


def deal(
    links: Mapping[int, Connection],
    messages: Mapping[int, Tensor],
    longest: Mapping[int, int],
    usual: int,
    timeout_s: float,
) -> dict[int, Tensor]:
    """Each peer's message for this one's to it: bytes, of a length that only its sender knows, up to longest[peer].

    One of up to `usual` bytes finds room without a word. FrameError names whose length cannot be.
    """
    deadline = Deadline(timeout_s)
    if level() is not None and links:
        return _deal_natively(links, messages, longest, usual, deadline)
    heard: dict[int, Tensor] = {}
    flows = {
        peer: Flow(link, _with_length(messages[peer]), _of_any_length(peer, longest[peer], heard))
        for peer, link in links.items()
    }
    move(flows, deadline)
    return heard


def _of_any_length(sender: int, longest: int, heard: dict[int, Tensor]) -> Iterator[memoryview]:
    """Room for a length, then for as many bytes, which become heard[sender]."""
    head = bytearray(_LENGTH_BYTES)
    yield memoryview(head)
    length = int.from_bytes(head, "little", signed=True)
    _check_length(sender, length, longest)
    heard[sender] = torch.empty(length, dtype=torch.uint8)
    yield heard[sender].numpy().data


def _check_length(sender: int, length: int, longest: int) -> None:
    if not 0 <= length <= longest:
        raise FrameError(f"a message from rank {sender} says it has {length} bytes of {longest}; nothing is applied")


def _with_length(message: Tensor) -> list[memoryview]:
    """What leaves of a message."""
    return [memoryview(bytearray(message.numel().to_bytes(_LENGTH_BYTES, "little"))), message.numpy().data]


def adds_natively(dtype: torch.dtype) -> bool:
    """Whether `add_up_` knows a type; others are added by torch, to the same bits."""
    return level() is not None and dtype in sockets.ADDED


def add_up_(vector: Tensor, rank: int, links: Mapping[int, Connection], timeout_s: float) -> None:
    """Both hops of a sum over all workers, each with a deadline; PeerError names who fails."""
    ends = [links[peer].fileno() if peer != rank else -1 for peer in range(len(links) + 1)]
    error, failed, has_moved = sockets.add_up_(vector, rank, ends, Deadline(timeout_s).left_ms)
    if error == sockets.LATE:
        raise _late(failed, timeout_s, has_moved=has_moved)
    if error:
        raise _gone(failed, OSError(error, os.strerror(error)))


def _deal_natively(
    links: Mapping[int, Connection],
    messages: Mapping[int, Tensor],
    longest: Mapping[int, int],
    usual: int,
    deadline: Deadline,
) -> dict[int, Tensor]:
    peers = list(links)
    ends = [link.fileno() for link in links.values()]
    outgoing, most = [messages[peer] for peer in peers], [longest[peer] for peer in peers]
    moved = sockets.deal(ends, outgoing, most, usual, deadline.left_ms)
    if moved.error == sockets.TOO_LONG:
        _check_length(peers[moved.failed], moved.lengths[moved.failed], most[moved.failed])
    if moved.error == sockets.LATE:
        late = min((peer, at) for at, peer in enumerate(peers) if not moved.is_over(at))[1]
        has_moved = moved.lengths[late] >= 0 or moved.in_left[late] < _LENGTH_BYTES
        raise _late(peers[late], deadline.timeout_s, has_moved=has_moved)
    if moved.error:
        raise _gone(peers[moved.failed], OSError(moved.error, os.strerror(moved.error)))
    return dict(zip(peers, moved.messages, strict=True))


def _move_natively(flows: Mapping[int, Flow], deadline: Deadline, in_pieces: bool) -> tuple[_Counts, _Failed]:
    """What comes next of each."""
    ends = [flow.link.fileno() for flow in flows.values()]
    out, into = [flow.out.view for flow in flows.values()], [flow.into.view for flow in flows.values()]
    moved = sockets.exchange(ends, out, into, deadline.left_ms, in_pieces=in_pieces)
    failed: _Failed = {}
    if moved.error not in (0, sockets.LATE):
        failed[list(flows)[moved.failed]] = OSError(moved.error, os.strerror(moved.error))
    sent = [len(view) - left for view, left in zip(out, moved.out_left, strict=True)]
    received = [len(view) - left for view, left in zip(into, moved.in_left, strict=True)]
    return dict(zip(flows, zip(sent, received, strict=True), strict=True)), failed


def _move(flows: Mapping[int, Flow], deadline: Deadline) -> tuple[_Counts, _Failed]:
    """What each takes and has now."""
    waiting = select.poll()
    peers = {flow.link.fileno(): peer for peer, flow in flows.items()}
    for socket, peer in peers.items():
        flow = flows[peer]
        waiting.register(socket, (select.POLLOUT if flow.out.view else 0) | (select.POLLIN if flow.into.view else 0))
    counts: _Counts = {}
    failed: _Failed = {}
    for socket, events in waiting.poll(deadline.left_ms):
        peer = peers[socket]
        flow = flows[peer]
        sent = received = 0
        try:
            if flow.into.view and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                with suppress(BlockingIOError):
                    received = flow.link.receive_some(flow.into.view)
            if flow.out.view and events & (select.POLLOUT | select.POLLERR):
                with suppress(BlockingIOError):
                    sent = flow.link.send_some(flow.out.view)
        except OSError as error:
            failed[peer] = error
        counts[peer] = sent, received
    return counts, failed


def _late(peer: int, timeout_s: float, *, has_moved: bool) -> PeerError:
    what = "is not through with a message after" if has_moved else "has said nothing for"
    return PeerError(f"rank {peer} {what} {timeout_s:g} s; see what it says there")


def _gone(peer: int, error: OSError) -> PeerError:
    return PeerError(f"rank {peer} is gone, or gave up this step ({error.strerror or error}); see what it says")
