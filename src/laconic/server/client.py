"""A worker's end towards dedicated servers."""

import json
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from laconic.errors import FrameError, LaconicError, LaunchError, ServerLostError
from laconic.layout import Layout
from laconic.transport import (
    Address,
    Connection,
    Flow,
    Kind,
    Message,
    Push,
    Traffic,
    Transport,
    check_connected,
    connect,
    exchange_addresses,
    longest_message,
    move_some,
    payload_of,
)

# Timeouts that a worker waits for a reply: the server waits one for a worker that sends nothing, and one for a worker
# that is slow to take its reply.
_TIMEOUTS_PER_REPLY = 3
_ERROR_BYTES = 65_536
_LAST_REPLIES_S = 1.0  # for what a server that is gone sent before
_LENGTH = struct.Struct("<q")  # of a layout's text


@dataclass
class _Server:
    """A connection to one server: what may still come from it, and what has come."""

    link: Connection
    awaited: deque[dict[Kind, int]] = field(default_factory=deque)  # kinds and lengths of replies that are due
    replies: deque[Message] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.flow = Flow(self.link)

    def expect(self) -> None:
        """Make room for the next reply, if one is due."""
        if self.awaited:
            self.flow.expect(self.awaited[0])

    def take(self) -> None:
        """Keep a reply that has come; FrameError where it tells what went wrong."""
        reply = self.flow.take()
        if reply is None:
            return
        if reply.kind == Kind.ERROR:
            raise FrameError(reply.text.decode(errors="replace"))
        self.awaited.popleft()
        self.replies.append(reply)


class ServerClient(Transport):
    """One of M workers whose entries are answered for by ranks that hold no data; all workers send in step.

    `num_living` and `place`, this worker's among those, are as of the last reply. What the servers add up is over the
    living; a sum over M is that, times M over their number. `was_late`: the last one was given without this worker.
    """

    has_servers = True
    num_living = 0
    place = 0
    was_late = False
    owned_share: int | None = None
    pull_delay = 2  # while a server replies, the next parts are on their way
    wire: torch.device | None = torch.device("cpu")

    def __init__(
        self,
        rank: int,
        num_workers: int,
        addresses: Sequence[Address],
        terms: str,
        timeout_s: float,
        longest: int = longest_message(),
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.num_shares = len(addresses)
        self.num_living = num_workers
        self.place = rank
        self.was_late = False
        self.traffic = Traffic()
        self._longest = longest  # bytes of a reply whose length only the server knows
        self._reply_timeout_s = _TIMEOUTS_PER_REPLY * timeout_s
        self._layouts: dict[int, Layout] = {}  # that the servers have, by bucket
        links: list[Connection] = []
        try:
            for number, at in enumerate(addresses):
                links.append(connect(at, rank, f"server {number}", timeout_s, terms, caller=f"worker {rank}"))
        except LaunchError:
            for link in links:
                link.close()
            raise
        self._servers = [_Server(link) for link in links]
        for link in links:
            link.set_timeout(self._reply_timeout_s)

    def broadcast(self, frame: Tensor | None, speaker: int, longest: int) -> Tensor:
        payloads = [payload_of(b"")] * self.num_shares
        if frame is not None and self.rank == speaker:
            payloads[0] = frame.cpu()
        return self._request(Message(Kind.ECHO), "broadcast", payloads, [longest] * self.num_shares)[0].payload

    def push(self, push: Push) -> dict[int, Tensor]:
        parts = [part.cpu() for part in push.parts]
        kind = Kind.PARTS
        if self._layouts.get(push.bucket) != push.layout:
            self._layouts[push.bucket] = push.layout
            kind = Kind.LAYOUT
            parts = [with_layout(push.layout, part) for part in parts]
        bytes_out = self._send(Message(kind, push.step, push.bucket), parts, push.longest)
        self.traffic.count("up", bytes_out, bytes_out, 0)
        return {}

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        self._move_until(lambda server: bool(server.replies))
        replies = [server.replies.popleft() for server in self._servers]
        for number, reply in enumerate(replies):
            if (reply.step, reply.bucket) != (push.step, push.bucket):
                self._fail(number, FrameError(f"answered {reply}, not step {push.step}, bucket {push.bucket}"))
        self._note(replies)
        self.traffic.count("down", 0, 0, sum(reply.num_bytes for reply in replies))
        return [reply.payload for reply in replies]

    def receive_pending(self) -> None:
        before = None
        while any(server.awaited for server in self._servers):
            left = [len(server.flow.into.view) for server in self._servers]
            if left == before:
                return
            before = left
            self._move(0.0)

    def shut_down(self) -> None:
        for server in self._servers:
            server.link.shut_down()

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the living, on the CPU; not of gradients, so it does not count as training."""
        return torch.cat([reply.payload for reply in self._add(tensor, Kind.TOTAL, "total")]).view(tensor.shape)

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        tensor.copy_(sum_over(self._add(tensor, Kind.AVERAGE, kind), self.num_workers).view(tensor.shape))

    def sum_gradients_(self, tensor: Tensor, kind: str) -> None:
        tensor.copy_(sum_over(self._add(tensor, Kind.SUM, kind), self.num_workers).view(tensor.shape))

    def _add(self, tensor: Tensor, how: Kind, kind: str) -> list[Message]:
        """Each server's sum of its piece."""
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        return self._request(Message(how), kind, flat.tensor_split(self.num_shares))

    def owner_states(self) -> list[bytes]:
        """What each server keeps, for a checkpoint: sent to the first of the living, empty for the others."""
        return [reply.text for reply in self._request(Message(Kind.STATE), "state")]

    def load_owner_states(self, states: Sequence[bytes]) -> None:
        """Give each server back what it kept; all workers make this call, and the first of them sends the states."""
        payloads = [payload_of(state) for state in states] if self.place == 0 else []
        self._request(Message(Kind.LOAD), "state", payloads)

    def server_stats(self) -> list[dict[str, Any]]:
        """What each server counted so far."""
        return [json.loads(reply.text) for reply in self._request(Message(Kind.STATS), "stats")]

    def close(self) -> None:
        """Tell the servers that this worker is done, unless a reply is due, and close the connections."""
        for server in self._servers:
            if not server.awaited:
                with suppress(OSError, FrameError):  # it is gone, and so are we
                    server.link.send(Message(Kind.CLOSE))
                    server.link.receive({Kind.CLOSE: 0, Kind.ERROR: _ERROR_BYTES}, self._reply_timeout_s)
            server.link.close()
        self._servers = []

    def _request(
        self, about: Message, kind: str, payloads: Sequence[Tensor] = (), longest: Sequence[int] = ()
    ) -> list[Message]:
        """Send each server its payload, or none, and wait for all replies, each of at most so many bytes."""
        longest = longest or [self._longest] * self.num_shares
        bytes_out = self._send(about, payloads or [about.payload] * self.num_shares, longest)
        self._move_until(lambda server: not server.awaited)  # each replies in order
        replies = [server.replies.pop() for server in self._servers]
        self._note(replies)
        self.traffic.count(kind, bytes_out, bytes_out, sum(reply.num_bytes for reply in replies))
        return replies

    def _send(self, about: Message, payloads: Sequence[Tensor], longest: Sequence[int]) -> int:
        """Send something to each server, and receive earlier replies meanwhile; how many bytes left."""
        bytes_out = 0
        for server, payload, most in zip(self._servers, payloads, longest, strict=True):
            message = replace(about, payload=payload)
            server.flow.send(message)
            server.awaited.append({about.kind: most, Kind.LATE: most, Kind.ERROR: _ERROR_BYTES})
            bytes_out += message.num_bytes
        self._move_until(lambda server: not server.flow.out.view)
        return bytes_out

    def _move_until(self, is_over: Callable[[_Server], bool]) -> None:
        """Send and receive, until that holds for all servers; ServerLostError where one is gone, or takes too long.

        The timeout is for each piece that it takes, and for a whole reply.
        """
        since = time.monotonic()
        while slow := [number for number, server in enumerate(self._servers) if not is_over(server)]:
            since = max(since, *(server.flow.sent_at for server in self._servers))
            left_s = since + self._reply_timeout_s - time.monotonic()
            if left_s < 0:
                self._fail(slow[0], TimeoutError())
            self._move(left_s)

    def _move(self, timeout_s: float) -> None:
        """Send and receive until a piece is through, or for so long."""
        for server in self._servers:
            server.expect()
        flows = {number: server.flow for number, server in enumerate(self._servers)}
        for number, error in move_some(flows, timeout_s).items():
            self._fail(number, error)
        for number in flows:
            self._take(number)

    def _take(self, number: int) -> None:
        try:
            self._servers[number].take()
        except FrameError as error:
            raise FrameError(f"server {number}: {error}") from None

    def _note(self, replies: Sequence[Message]) -> None:
        """Note how many live, and whether this worker was late, as the last reply has it."""
        self.num_living = replies[-1].living
        self.place = replies[-1].place
        self.was_late = replies[-1].kind == Kind.LATE

    def _fail(self, number: int, error: Exception) -> NoReturn:
        """Raise what a server sent before it was gone, or else that it is."""
        if isinstance(error, FrameError):
            raise FrameError(f"server {number} {error}; run the same release of laconic on all ranks") from None
        server = self._servers[number]
        if isinstance(error, ConnectionError):
            with suppress(OSError):
                while server.awaited:
                    server.expect()
                    server.link.fill(server.flow.into, _LAST_REPLIES_S)
                    self._take(number)
        how = f"has not answered for {self._reply_timeout_s:g} s" if isinstance(error, TimeoutError) else "is gone"
        raise ServerLostError(
            f"server {number} {how}, or has given this worker up; start again, with --resume from the last "
            "checkpoint, and with a longer --server-timeout where a step may take that long"
        ) from None


def connect_to_servers(
    rank: int, num_workers: int, servers: Sequence[int], terms: str, timeout_s: float, longest: int = longest_message()
) -> ServerClient:
    """One worker's end towards the ranks that serve; a call that all workers make, while those call serve().

    Raises:
        LaunchError: on all ranks, where one cannot reach a server, or cannot prove that it knows the secret.
    """
    addresses = exchange_addresses(servers, None)
    client, failure = None, ""
    try:
        client = ServerClient(rank, num_workers, addresses, terms, timeout_s, longest)
    except LaunchError as error:
        failure = str(error)
    try:
        check_connected(failure, is_server=False)
    except LaconicError:
        if client is not None:
            client.shut_down()
        raise
    assert client is not None
    return client


def fail_servers(servers: Sequence[int], cause: str) -> NoReturn:
    """End servers that wait for their workers, who cannot connect to each other; a call that all workers make.

    Raises:
        LaunchError: on all ranks, with this cause.
    """
    exchange_addresses(servers, None)
    check_connected(cause, is_server=False)
    raise LaunchError(cause)


def sum_over(replies: Sequence[Message], num_workers: int) -> Tensor:
    """The servers' pieces as sums over all workers: a worker may have died between its messages to two servers."""
    return torch.cat(
        [
            reply.payload if reply.living == num_workers else reply.payload.mul_(num_workers / reply.living)
            for reply in replies
        ]
    )


def with_layout(layout: Layout, part: Tensor) -> Tensor:
    """A bucket's first part, behind the layout that it and later ones are of."""
    text = json.dumps([[span.name, span.num_entries] for span in layout.spans]).encode()
    return torch.cat([payload_of(_LENGTH.pack(len(text)) + text), part])


def without_layout(payload: Tensor, most_entries: int) -> tuple[Layout, Tensor]:
    """The inverse; ValueError if this is no layout, or one of more entries than that."""
    if payload.dtype != torch.uint8 or payload.numel() < _LENGTH.size:
        raise ValueError
    (length,) = _LENGTH.unpack(payload[: _LENGTH.size].numpy().data)
    if not 0 <= length <= payload.numel() - _LENGTH.size:
        raise ValueError
    text, part = payload[_LENGTH.size :].tensor_split([length])
    names, sizes = zip(*json.loads(bytes(text.numpy())), strict=True)
    if not all(type(name) is str for name in names) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError
    if sum(sizes) > most_entries:
        raise ValueError
    return Layout.of(names, sizes), part.clone()  # a part may begin anywhere, its words may not
