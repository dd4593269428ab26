"""A worker's end towards dedicated servers."""

import json
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from laconic.errors import FrameError, ServerLostError
from laconic.layout import Layout
from laconic.transport.connection import Kind, Message, longest_message, payload_of, rooms_of_message, views_of
from laconic.transport.door import Address, connect
from laconic.transport.moving import Flow, move_some
from laconic.transport.traffic import Traffic
from laconic.transport.transport import Push, Transport

# Timeouts that a worker waits for an answer: the server waits one for a worker that is silent, and one for a worker
# that is slow to take its answer.
_PATIENCE = 3
_ERROR_BYTES = 65_536
_LAST_WORDS_S = 1.0  # for what a server that is gone has said before
_LENGTH = struct.Struct("<q")  # of a layout's text


class ServerClient(Transport):
    """One of M workers whose entries are answered for by ranks that hold no data; what all of them say is in step.

    `num_living` and `place`, this worker's among those, are as of the last answer. What the servers add up is over the
    living; a sum over M is that, times M over their number. `was_late`: the last one was given without this worker.
    """

    has_servers = True
    num_living = 0
    place = 0
    was_late = False
    owned_share: int | None = None
    pull_turn = 2  # while a server answers, the next parts are on their way
    wire: torch.device | None = torch.device("cpu")

    def __init__(
        self,
        rank: int,
        num_workers: int,
        addresses: Sequence[Address],
        greeting: str,
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
        self._longest = longest  # bytes of an answer whose length only the server knows
        self._patience_s = _PATIENCE * timeout_s
        self._told: dict[int, Layout] = {}  # by bucket
        self._connections = [connect(at, rank, f"server {n}", timeout_s, greeting) for n, at in enumerate(addresses)]
        self._flows = {n: Flow(link) for n, link in enumerate(self._connections)}
        self._awaited: dict[int, deque[dict[Kind, int]]] = {n: deque() for n in self._flows}  # what may still come
        self._answers: dict[int, deque[Message]] = {n: deque() for n in self._flows}  # that have come
        for connection in self._connections:
            connection.set_timeout(self._patience_s)

    def broadcast(self, frame: Tensor | None, speaker: int, longest: int) -> Tensor:
        said = [payload_of(b"")] * self.num_shares
        if frame is not None and self.rank == speaker:
            said[0] = frame.cpu()
        return self._ask(Message(Kind.ECHO), "broadcast", said, [longest] * self.num_shares)[0].payload

    def push(self, push: Push) -> dict[int, Tensor]:
        parts = [part.cpu() for part in push.parts]
        kind = Kind.PARTS
        if self._told.get(push.bucket) != push.layout:
            self._told[push.bucket] = push.layout
            kind = Kind.LAYOUT
            parts = [with_layout(push.layout, part) for part in parts]
        bytes_out = self._send(Message(kind, push.step, push.bucket), parts, push.longest)
        self.traffic.count("up", bytes_out, bytes_out, 0)
        return {}

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        self._move_until(lambda number: bool(self._answers[number]))
        replies = [answers.popleft() for answers in self._answers.values()]
        for number, reply in enumerate(replies):
            if (reply.step, reply.bucket) != (push.step, push.bucket):
                self._fail(number, FrameError(f"answered {reply}, not step {push.step}, bucket {push.bucket}"))
        self._note(replies)
        self.traffic.count("down", 0, 0, sum(reply.num_bytes for reply in replies))
        return [reply.payload for reply in replies]

    def catch_up(self) -> None:
        before = None
        while any(self._awaited.values()) and before != (before := [len(f.into.view) for f in self._flows.values()]):
            self._go_on(0.0)

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.shut_down()

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
        return self._ask(Message(how), kind, flat.tensor_split(self.num_shares))

    def owner_states(self) -> list[bytes]:
        """What each server keeps, for a checkpoint: told to the first of the living, empty for the others."""
        return [reply.text for reply in self._ask(Message(Kind.STATE), "state")]

    def load_owner_states(self, states: Sequence[bytes]) -> None:
        """Give each server back what it kept; all workers make this call, and the first of them says it."""
        said = [payload_of(state) for state in states] if self.place == 0 else []
        self._ask(Message(Kind.LOAD), "state", said)

    def server_stats(self) -> list[dict[str, Any]]:
        """What each server counted so far."""
        return [json.loads(reply.text) for reply in self._ask(Message(Kind.STATS), "stats")]

    def close(self) -> None:
        """Tell the servers that this worker is done, and hang up; without a word in the midst of others."""
        for number, connection in enumerate(self._connections):
            if not self._awaited[number]:
                with suppress(OSError, FrameError):  # it is gone, and so are we
                    connection.send(Message(Kind.CLOSE))
                    connection.receive({Kind.CLOSE: 0, Kind.ERROR: _ERROR_BYTES}, self._patience_s)
            connection.close()
        self._connections = []

    def _ask(
        self, about: Message, kind: str, payloads: Sequence[Tensor] = (), longest: Sequence[int] = ()
    ) -> list[Message]:
        """Send each server its payload, or none, and wait for all answers, each of at most so many bytes."""
        longest = longest or [self._longest] * self.num_shares
        bytes_out = self._send(about, payloads or [about.payload] * self.num_shares, longest)
        self._move_until(lambda number: not self._awaited[number])  # each answers in order
        replies = [answers.pop() for answers in self._answers.values()]
        self._note(replies)
        self.traffic.count(kind, bytes_out, bytes_out, sum(reply.num_bytes for reply in replies))
        return replies

    def _send(self, about: Message, payloads: Sequence[Tensor], longest: Sequence[int]) -> int:
        """Say something to each server, and hear meanwhile what they answer to earlier things; how many bytes went."""
        bytes_out = 0
        for number, (payload, room) in enumerate(zip(payloads, longest, strict=True)):
            message = replace(about, payload=payload)
            self._flows[number].say(views_of(message))
            self._awaited[number].append({about.kind: room, Kind.LATE: room, Kind.ERROR: _ERROR_BYTES})
            bytes_out += message.num_bytes
        self._move_until(lambda number: not self._flows[number].out.view)
        return bytes_out

    def _move_until(self, is_over: Callable[[int], bool]) -> None:
        """Send and receive, until that holds for all servers; ServerLostError where one is gone, or takes too long.

        That is for each piece that it takes, and for a whole answer.
        """
        since = time.monotonic()
        while late := [number for number in self._flows if not is_over(number)]:
            since = max(since, *(flow.taken_at for flow in self._flows.values()))
            left_s = since + self._patience_s - time.monotonic()
            if left_s < 0:
                self._fail(late[0], TimeoutError())
            self._go_on(left_s)

    def _go_on(self, timeout_s: float) -> None:
        """Send and receive until a piece is through, or for so long."""
        for number in self._flows:
            self._expect(number)
        for number, error in move_some(self._flows, timeout_s).items():
            self._fail(number, error)
        for number, flow in self._flows.items():
            if flow.into.found is not None:
                self._take(number)

    def _expect(self, number: int) -> None:
        """Make room for the next answer, if one is awaited."""
        flow = self._flows[number]
        if self._awaited[number] and not flow.into.view:
            flow.hear(rooms_of_message(self._awaited[number][0]))

    def _note(self, replies: Sequence[Message]) -> None:
        """Who is there, and whether this worker was heard, as the last of them says."""
        self.num_living = replies[-1].living
        self.place = replies[-1].place
        self.was_late = replies[-1].kind == Kind.LATE

    def _take(self, number: int) -> None:
        """An answer that has come."""
        reply: Message = self._flows[number].take()
        if reply.kind == Kind.ERROR:
            raise FrameError(f"server {number}: {reply.text.decode(errors='replace')}")
        self._awaited[number].popleft()
        self._answers[number].append(reply)

    def _fail(self, number: int, error: Exception) -> NoReturn:
        """Raise what a server has said before it was gone, or else that it is."""
        if isinstance(error, FrameError):
            raise FrameError(f"server {number} {error}; run the same release of laconic on all ranks") from None
        flow = self._flows[number]
        if isinstance(error, ConnectionError):
            with suppress(OSError):
                while self._awaited[number]:
                    self._expect(number)
                    flow.link.fill(flow.into, _LAST_WORDS_S)
                    self._take(number)
        how = f"has not answered for {self._patience_s:g} s" if isinstance(error, TimeoutError) else "is gone"
        raise ServerLostError(
            f"server {number} {how}, or has given this worker up; start again, with --resume from the last "
            "checkpoint, and with a longer --server-timeout where a step may take that long"
        ) from None


def sum_over(replies: Sequence[Message], num_workers: int) -> Tensor:
    """The servers' pieces as sums over all workers: one may have heard a worker that died before it told the next."""
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
