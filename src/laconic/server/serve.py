"""serve(scheme): what a rank does that holds no data, and answers for entries instead."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import FrameError, LaunchError, SchemeError
from laconic.layout import Layout
from laconic.recipes import parse
from laconic.scheme import AnyScheme, Scheme
from laconic.server import Owner
from laconic.server.client import without_layout
from laconic.server.listener import Listener
from laconic.transport.connection import Address, Kind, Message, payload_of
from laconic.wire import Contents

TIMEOUT_S = 60.0  # a cable out for 20 s costs TCP up to 26 until it tries again


@dataclass(frozen=True)
class ServerStats:
    """A server's account of its answers."""

    steps: int  # of which it was asked for entries; of dense ones it is not
    num_workers: int
    lost: dict[int, str]  # worker -> how, and after which step
    bytes_out: int  # of training: tests, stats and checkpoints are not counted
    bytes_in: int
    held_bytes: int  # what it keeps between steps, at most its share of the model

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def serve(
    scheme: AnyScheme | str,
    *,
    servers: Sequence[int] = (0,),
    timeout_s: float = TIMEOUT_S,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> ServerStats:
    """Answer the workers until they are done; a call that each rank in `servers` makes while all others attach.

    A worker that hangs up, or lets the others wait for longer than `timeout_s`, is left behind: means and votes are
    over those from then on. `facts` are told beside the stats to workers that ask.
    """
    scheme = served_scheme(scheme)
    listener = Listener(dist.get_world_size() - len(servers), timeout_s)
    exchange_addresses(servers, listener)
    asked = {rank: json.loads(text) for rank, text in listener.accept().items()}
    for rank, terms in asked.items():
        if terms["scheme"] != str(scheme):
            listener.fail(
                FrameError(f"worker {rank} runs {terms['scheme']}, this server {scheme}; give all the same scheme")
            )
    wanted = {name: any(terms[name] for terms in asked.values()) for name in ("undoes", "holds_idle")}
    owner = Owner(scheme, list(servers).index(dist.get_rank()), len(servers), **wanted)
    handler = _RequestHandler(listener, owner, facts)
    try:
        while listener.living and handler.handle_round():
            pass
    finally:
        listener.close()
    return handler.stats()


def served_scheme(scheme: AnyScheme | str) -> Scheme:
    """The scheme, if dedicated servers can answer it."""
    made = parse(scheme) if isinstance(scheme, str) else scheme
    if not isinstance(made, Scheme) or not made.has_owners:
        raise SchemeError(f"{made} asks no server; give one with exchange=Server(), or leave the servers out")
    return made


def greeting(scheme: Scheme, *, undoes: bool, holds_idle: bool) -> str:
    """What a worker says to a server when it comes: the terms on which it is to be answered."""
    return json.dumps({"scheme": str(scheme), "undoes": undoes, "holds_idle": holds_idle})


def exchange_addresses(servers: Sequence[int], listener: Listener | None) -> list[Address]:
    """Where each server is; a call that all ranks make, servers with their listener."""
    addresses = []
    for server in servers:
        box: list[Any] = [listener.address if listener is not None and dist.get_rank() == server else None]
        try:
            dist.broadcast_object_list(box, src=server)
        except RuntimeError:  # as Gloo tells of a rank that has ended
            if listener is None:
                raise
            raise LaunchError("the workers ended before they met this server; see what they said") from None
        addresses.append(box[0])
    return addresses


class _RequestHandler:
    """Does what a round of messages asks for."""

    def __init__(self, listener: Listener, owner: Owner, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._listener = listener
        self._owner = owner
        self._facts = facts
        self._layouts: dict[int, Layout] = {}
        self._read: dict[int, Contents] = {}  # of the round that is being heard, by worker
        self._steps = 0

    def handle_round(self) -> bool:
        """Hear one round and answer it; False when the workers are done."""
        self._read = {}
        heard = self._listener.hear(self._arrived)
        if not heard:
            return False
        about = next(iter(heard.values()))
        self._listener.answer(self._reply(about, heard), about)
        return about.kind != Kind.CLOSE

    def _reply(self, about: Message, heard: Mapping[int, Message]) -> Tensor | dict[int, Tensor]:
        if about.kind in (Kind.LAYOUT, Kind.PARTS):
            self._steps = max(self._steps, about.step + 1)
            told = {rank: self._read[rank] for rank in heard}
            layout = self._layouts[about.bucket]
            return self._owner.answer_to(told, layout, step=about.step, bucket=about.bucket).cpu()
        if about.kind in (Kind.SUM, Kind.TOTAL):
            return add_up(heard)
        given = next((message.payload for message in heard.values() if message.payload.numel()), payload_of(b""))
        if about.kind == Kind.ECHO:
            return given
        if about.kind == Kind.STATE:
            packed = io.BytesIO()
            torch.save(self._owner.state_dict(), packed)
            first = self._listener.living[0]
            return {rank: payload_of(packed.getvalue() if rank == first else b"") for rank in self._listener.living}
        if about.kind == Kind.LOAD and given.numel():
            self._owner.load_state_dict(torch.load(io.BytesIO(given.numpy().tobytes()), weights_only=True))
        if about.kind == Kind.STATS:
            return payload_of(json.dumps({**self.stats().as_dict(), **self._facts()}).encode())
        return payload_of(b"")

    def _arrived(self, rank: int, message: Message) -> None:
        """Read a part while those of others are still on their way."""
        if message.kind not in (Kind.LAYOUT, Kind.PARTS):
            return
        part = message.payload
        if message.kind == Kind.LAYOUT:
            self._layouts[message.bucket], part = without_layout(part)
        layout = self._layouts[message.bucket]
        try:
            self._read[rank] = self._owner.read(part, layout, step=message.step, bucket=message.bucket, peer=rank)
        except FrameError as error:
            self._listener.fail(error)

    def stats(self) -> ServerStats:
        traffic = self._listener.traffic
        return ServerStats(
            steps=self._steps,
            num_workers=self._listener.num_workers,
            lost=dict(self._listener.lost),
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            held_bytes=self._owner.num_bytes,
        )


def add_up(heard: Mapping[int, Message]) -> Tensor:
    """The sum of what all sent, in rank order."""
    total, *others = (message.payload for message in heard.values())
    for other in others:
        total = total + other
    return total
