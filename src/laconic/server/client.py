"""A worker's end towards dedicated servers."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.errors import FrameError, ServerLostError
from laconic.layout import Layout
from laconic.transport.connection import (
    CLOSE,
    ECHO,
    ERROR,
    HEAD_BYTES,
    HELLO,
    LAYOUT,
    LOAD,
    PARTS,
    STATE,
    STATS,
    SUM,
    TOTAL,
    Message,
    from_bytes,
    receive,
    send,
    to_bytes,
    tuned,
    with_layout,
)
from laconic.transport.traffic import Traffic
from laconic.transport.transport import Push

_PATIENCE = 2  # timeouts that a worker waits for an answer: the server itself waits one for a worker that is silent


class ServerClient:
    """One of M workers whose entries are answered for by ranks that hold no data; what all of them say is in step.

    `num_living` and `place`, this worker's among those, are as of the last answer. What the servers add up is over the
    living; a sum over M is that, times M over their number.
    """

    owned_share: int | None = None
    wire: torch.device | None = torch.device("cpu")

    def __init__(
        self, rank: int, num_workers: int, addresses: Sequence[tuple[str, int, str]], greeting: str, timeout_s: float
    ) -> None:
        self.rank, self.num_workers, self.num_shares = rank, num_workers, len(addresses)
        self.num_living, self.place = num_workers, rank
        self.traffic = Traffic()
        self._patience_s = _PATIENCE * timeout_s
        self._told: dict[int, Layout] = {}  # by bucket
        self._connections = []
        for host, port, token in addresses:
            connection = tuned(socket.create_connection((host, port), timeout_s), self._patience_s)
            send(connection, Message(HELLO, payload=(token + greeting).encode(), place=rank))
            self._connections.append(connection)

    def broadcast(self, frame: Tensor | None, speaker: int) -> Tensor:
        said = b"" if frame is None or self.rank != speaker else to_bytes(frame)
        replies = self._ask(Message(ECHO), [said] + [b""] * (self.num_shares - 1), "broadcast")
        return from_bytes(replies[0].payload)

    def push_pull(self, push: Push) -> list[Tensor]:
        parts = [to_bytes(part) for part in push.parts]
        kind = PARTS
        if self._told.get(push.bucket) != push.layout:
            self._told[push.bucket] = push.layout
            kind = LAYOUT
            parts = [with_layout(push.layout, part) for part in parts]
        replies = self._ask(Message(kind, push.step, push.bucket), parts, "")
        return [from_bytes(reply.payload) for reply in replies]

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the living, on the CPU; not of gradients, so it does not count as training."""
        chunks = self._added(tensor, TOTAL, "total")
        return torch.cat([chunk for chunk, _ in chunks]).view(tensor.shape)

    def all_reduce_(self, tensor: Tensor, kind: str) -> None:
        chunks = self._added(tensor, SUM, kind)
        for chunk, num_living in chunks:  # one server may have heard a worker that died before it told the next
            if num_living != self.num_workers:
                chunk.mul_(self.num_workers / num_living)
        tensor.copy_(torch.cat([chunk for chunk, _ in chunks]).view(tensor.shape))

    def _added(self, tensor: Tensor, how: int, kind: str) -> list[tuple[Tensor, int]]:
        """Of each server's piece the sum, and over how many workers it is."""
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        chunks = torch.tensor_split(flat, self.num_shares)
        name = str(flat.dtype).removeprefix("torch.").encode().ljust(16)
        replies = self._ask(Message(how), [name + to_bytes(chunk) for chunk in chunks], kind)
        return [(from_bytes(reply.payload, flat.dtype), reply.living) for reply in replies]

    def owner_states(self) -> list[bytes]:
        """What each server keeps, for a checkpoint: told to the first of the living, empty for the others."""
        return [bytes(reply.payload) for reply in self._ask(Message(STATE), [b""] * self.num_shares, "state")]

    def load_owner_states(self, states: Sequence[bytes]) -> None:
        """Give each server back what it kept; all workers make this call, and the first of them says it."""
        said = states if self.place == 0 and states else [b""] * self.num_shares
        self._ask(Message(LOAD), said, "state")

    def server_stats(self) -> list[dict[str, object]]:
        """What each server counted so far."""
        replies = self._ask(Message(STATS), [b""] * self.num_shares, "stats")
        return [json.loads(bytes(reply.payload)) for reply in replies]

    def close(self) -> None:
        """Tell the servers that this worker is done, and hang up."""
        for connection in self._connections:
            try:
                send(connection, Message(CLOSE))
                receive(connection)
            except OSError:
                pass  # it is gone, and so are we
            connection.close()
        self._connections = []

    def _ask(self, about: Message, payloads: Sequence[bytes], kind: str) -> list[Message]:
        """Send each server its payload and wait for all answers."""
        out = heard = 0
        replies = []
        for number, connection in enumerate(self._connections):
            try:
                out += send(connection, Message(about.kind, about.step, about.bucket, payloads[number]))
            except OSError as error:
                raise self._lost(number, error) from None
        for number, connection in enumerate(self._connections):
            try:
                reply = receive(connection)
            except OSError as error:
                raise self._lost(number, error) from None
            if reply.kind == ERROR:
                raise FrameError(f"server {number}: {bytes(reply.payload).decode(errors='replace')}")
            heard += HEAD_BYTES + len(reply.payload)
            self.num_living, self.place = reply.living, reply.place
            replies.append(reply)
        if kind:
            self.traffic.count(kind, out, out, heard)
        else:
            self.traffic.count("up", out, out, 0)
            self.traffic.count("down", 0, 0, heard)
        return replies

    def _lost(self, number: int, error: OSError) -> ServerLostError:
        how = f"has not answered for {self._patience_s:g} s" if isinstance(error, TimeoutError) else "is gone"
        return ServerLostError(
            f"server {number} {how}, or has given this worker up; start again, with --resume from the last checkpoint, "
            "and with a longer --server-timeout where a step may take that long"
        )
