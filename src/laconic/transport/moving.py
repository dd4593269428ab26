"""Bytes to and from several connections at once: natively, where that is built, or by Python."""

import math
import os
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
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

    def __init__(self, link: Connection, out: Iterator[memoryview], into: Iterator[memoryview]) -> None:
        self.link = link
        self.out = Cursor(out)
        self.into = Cursor(into)
        self.has_moved = False  # whether something of what comes has come

    def hear(self, into: Iterator[memoryview]) -> None:
        """Make room for what comes next."""
        self.into = Cursor(into)
        self.has_moved = False

    def take(self) -> Any:
        """What has come."""
        found, self.into.found = self.into.found, None
        return found

    def advance(self, sent: int, received: int) -> None:
        """So many bytes have crossed."""
        self.has_moved |= received > 0
        self.out.advance(sent)
        self.into.advance(received)

    @property
    def is_through(self) -> bool:
        return not self.out.view and not self.into.view


def move(flows: Mapping[int, Flow], deadline: Deadline) -> None:
    """Send and receive until all is through; PeerError names who fails."""
    while flows := {peer: flow for peer, flow in flows.items() if not flow.is_through}:
        if level() is not None:
            _move_natively(flows, deadline)
        else:
            _move(flows, deadline)


def move_some(flows: Mapping[int, Flow], timeout_s: float) -> dict[int, Exception]:
    """Send and receive until a piece of one is through, or for so long; how those failed who did."""
    flows = {peer: flow for peer, flow in flows.items() if not flow.is_through}
    timeout_ms = Deadline(timeout_s).left_ms
    failed: dict[int, Exception] = {}
    if level() is not None:
        moved = _exchanged(flows, timeout_ms, in_pieces=True)
        if moved.error not in (0, sockets.LATE):
            failed[list(flows)[moved.failed]] = OSError(moved.error, os.strerror(moved.error))
        steps = {peer: partial(_advance, flow, moved, at) for at, (peer, flow) in enumerate(flows.items())}
    else:
        steps = {peer: partial(_go_on, flows[peer], events) for peer, events in _ready(flows, timeout_ms).items()}
    for peer, step in steps.items():
        try:
            step()
        except (OSError, FrameError) as error:
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
        peer: Flow(link, iter(_with_length(messages[peer])), _of_any_length(peer, longest[peer], heard))
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


def _move_natively(flows: Mapping[int, Flow], deadline: Deadline) -> None:
    """What comes next of each."""
    moved = _exchanged(flows, deadline.left_ms, in_pieces=False)
    if moved.error not in (0, sockets.LATE):
        raise _gone(list(flows)[moved.failed], OSError(moved.error, os.strerror(moved.error)))
    for at, flow in enumerate(flows.values()):
        _advance(flow, moved, at)
    if moved.error == sockets.LATE:
        raise _late_of(flows, deadline)


def _exchanged(flows: Mapping[int, Flow], timeout_ms: int, *, in_pieces: bool) -> sockets.Moved:
    ends = [flow.link.fileno() for flow in flows.values()]
    out, into = [flow.out.view for flow in flows.values()], [flow.into.view for flow in flows.values()]
    return sockets.exchange(ends, out, into, timeout_ms, in_pieces=in_pieces)


def _advance(flow: Flow, moved: sockets.Moved, at: int) -> None:
    flow.advance(len(flow.out.view) - moved.out_left[at], len(flow.into.view) - moved.in_left[at])


def _move(flows: Mapping[int, Flow], deadline: Deadline) -> None:
    """A piece of it, at most: whoever wants more calls again."""
    ready = _ready(flows, deadline.left_ms)
    if not ready:
        raise _late_of(flows, deadline)
    for peer, events in ready.items():
        try:
            _go_on(flows[peer], events)
        except OSError as error:
            raise _gone(peer, error) from None


def _ready(flows: Mapping[int, Flow], timeout_ms: int) -> dict[int, int]:
    """For what, by peer."""
    waiting = select.poll()
    peers = {flow.link.fileno(): peer for peer, flow in flows.items()}
    for socket, peer in peers.items():
        flow = flows[peer]
        waiting.register(socket, (select.POLLOUT if flow.out.view else 0) | (select.POLLIN if flow.into.view else 0))
    return {peers[socket]: events for socket, events in waiting.poll(timeout_ms)}


def _go_on(flow: Flow, events: int) -> None:
    """Give and take what it takes and has now."""
    with suppress(BlockingIOError):
        if flow.into.view and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            flow.advance(0, flow.link.receive_some(flow.into.view))
    with suppress(BlockingIOError):
        if flow.out.view and events & (select.POLLOUT | select.POLLERR):
            flow.advance(flow.link.send_some(flow.out.view), 0)


def _late_of(flows: Mapping[int, Flow], deadline: Deadline) -> PeerError:
    peer = min(peer for peer, flow in flows.items() if not flow.is_through)
    return _late(peer, deadline.timeout_s, has_moved=flows[peer].has_moved)


def _late(peer: int, timeout_s: float, *, has_moved: bool) -> PeerError:
    what = "is not through with a message after" if has_moved else "has said nothing for"
    return PeerError(f"rank {peer} {what} {timeout_s:g} s; see what it says there")


def _gone(peer: int, error: OSError) -> PeerError:
    return PeerError(f"rank {peer} is gone, or gave up this step ({error.strerror or error}); see what it says")
