"""A worker's end towards dedicated servers."""

import json
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FrameError, ServerLostError
from laconic.layout import Layout
from laconic.transport.connection import Connection, Kind, Message, longest_message, payload_of
from laconic.transport.door import Address, connect
from laconic.transport.traffic import Traffic
from laconic.transport.transport import Push

# Timeouts that a worker waits for an answer: the server waits one for a worker that is silent, and one for a worker
# that is slow to take its answer.
_PATIENCE = 3
_ERROR_BYTES = 65_536
_LENGTH = struct.Struct("<q")  # of a layout's text


class ServerClient:
    """One of M workers whose entries are answered for by ranks that hold no data; what all of them say is in step.

    `num_living` and `place`, this worker's among those, are as of the last answer. What the servers add up is over the
    living; a sum over M is that, times M over their number. `was_late`: the last one was given without this worker.
    """

    owned_share: int | None = None
    pull_turn = 1  # a server hears nothing while a worker has not taken its last answer
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
        self._pushed: deque[Kind] = deque()  # and not pulled yet
        self._answers: deque[list[Message]] = deque()  # to the first of these, which came before another one's
        self._connections = [connect(at, rank, f"server {n}", timeout_s, greeting) for n, at in enumerate(addresses)]
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
        bytes_out = self._send(Message(kind, push.step, push.bucket), parts)
        self._pushed.append(kind)
        self.traffic.count("up", bytes_out, bytes_out, 0)
        return {}

    def pull(self, push: Push, own: Tensor | None) -> list[Tensor]:
        if not self._answers:
            self._receive_answers(push.longest)
        replies = self._answers.popleft()
        self._note(replies)
        self.traffic.count("down", 0, 0, sum(reply.num_bytes for reply in replies))
        return [reply.payload for reply in replies]

    def _receive_answers(self, longest: Sequence[int]) -> None:
        """Those to what was pushed first."""
        self._answers.append(self._receive(self._pushed.popleft(), longest))

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.shut_down()

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the living, on the CPU; not of gradients, so it does not count as training."""
        return torch.cat([reply.payload for reply in self._add(tensor, Kind.TOTAL, "total")]).view(tensor.shape)

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        how = Kind.SUM if kind == "dense" else Kind.AVERAGE  # which no wait budget cuts short
        tensor.copy_(sum_over(self._add(tensor, how, kind), self.num_workers).view(tensor.shape))

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
        """Tell the servers that this worker is done, and hang up."""
        for connection in self._connections:
            with suppress(OSError, FrameError):  # it is gone, and so are we
                connection.send(Message(Kind.CLOSE))
                connection.receive({Kind.CLOSE: 0, Kind.ERROR: _ERROR_BYTES}, self._patience_s)
            connection.close()
        self._connections = []

    def _ask(
        self, about: Message, kind: str, payloads: Sequence[Tensor] = (), longest: Sequence[int] = ()
    ) -> list[Message]:
        """Send each server its payload, or none, and wait for all answers, each of at most so many bytes."""
        bytes_out = self._send(about, payloads or [about.payload] * self.num_shares)
        while self._pushed:  # servers answer in order
            self._receive_answers([self._longest] * self.num_shares)
        replies = self._receive(about.kind, longest or [self._longest] * self.num_shares)
        self._note(replies)
        self.traffic.count(kind, bytes_out, bytes_out, sum(reply.num_bytes for reply in replies))
        return replies

    def _send(self, about: Message, payloads: Sequence[Tensor]) -> int:
        """How many bytes that were."""
        bytes_out = 0
        for number, payload in enumerate(payloads):
            with self._connected(number) as connection:
                bytes_out += connection.send(replace(about, payload=payload))
        return bytes_out

    def _receive(self, kind: Kind, longest: Sequence[int]) -> list[Message]:
        """Every server's next answer."""
        replies = []
        for number, room in enumerate(longest):
            with self._connected(number) as connection:
                most = {kind: room, Kind.LATE: room, Kind.ERROR: _ERROR_BYTES}
                reply = connection.receive(most, self._patience_s)
            if reply.kind == Kind.ERROR:
                raise FrameError(f"server {number}: {reply.text.decode(errors='replace')}")
            replies.append(reply)
        return replies

    def _note(self, replies: Sequence[Message]) -> None:
        """Who is there, and whether this worker was heard, as the last of them says."""
        self.num_living = replies[-1].living
        self.place = replies[-1].place
        self.was_late = replies[-1].kind == Kind.LATE

    @contextmanager
    def _connected(self, number: int) -> Iterator[Connection]:
        """The connection to a server; ServerLostError if it is gone or silent."""
        try:
            yield self._connections[number]
        except FrameError as error:
            raise FrameError(f"server {number} {error}; run the same release of laconic on all ranks") from None
        except OSError as error:
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
