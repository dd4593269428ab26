"""serve(scheme): what a rank does that holds no data, and answers for entries instead."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from laconic.errors import FrameError, LaunchError, SchemeError
from laconic.exchange import Server
from laconic.layout import Layout
from laconic.recipes import parse
from laconic.scheme import AnyScheme, Scheme
from laconic.server import Owner
from laconic.server.listener import Listener
from laconic.transport.connection import (
    CLOSE,
    ECHO,
    LAYOUT,
    LOAD,
    PARTS,
    STATE,
    STATS,
    SUM,
    TOTAL,
    Message,
    from_bytes,
    to_bytes,
    without_layout,
)
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
    desk = Listener(dist.get_world_size() - len(servers), timeout_s)
    meet(servers, desk)
    greetings = desk.welcome()
    said = {rank: json.loads(bytes(hello.payload)) for rank, hello in greetings.items()}
    for rank, terms in said.items():
        if terms["scheme"] != str(scheme):
            desk.fail(
                FrameError(f"worker {rank} runs {terms['scheme']}, this server {scheme}; give all the same scheme")
            )
    asked = {name: any(terms[name] for terms in said.values()) for name in ("undoes", "holds_idle")}
    owner = Owner(scheme, list(servers).index(dist.get_rank()), len(servers), **asked)
    clerk = _Clerk(desk, owner, facts)
    try:
        while desk.living and clerk.round():
            pass
    finally:
        desk.close()
    return clerk.stats()


def served_scheme(scheme: AnyScheme | str) -> Scheme:
    """The scheme, if dedicated servers can answer it."""
    made = parse(scheme) if isinstance(scheme, str) else scheme
    if not isinstance(made, Scheme) or not isinstance(made.exchange, Server):
        raise SchemeError(f"{made} asks no server; give one with exchange=Server(), or leave the servers out")
    return made


def greeting(scheme: Scheme, *, undoes: bool, holds_idle: bool) -> str:
    """What a worker says to a server when it comes: the terms on which it is to be answered."""
    return json.dumps({"scheme": str(scheme), "undoes": undoes, "holds_idle": holds_idle})


def meet(servers: Sequence[int], desk: Listener | None) -> list[tuple[str, int, str]]:
    """Where each server is; a call that all ranks make."""
    addresses = []
    for server in servers:
        box: list[Any] = [desk.address if desk is not None and dist.get_rank() == server else None]
        try:
            dist.broadcast_object_list(box, src=server)
        except RuntimeError:  # as Gloo tells of a rank that has ended
            if desk is None:
                raise
            raise LaunchError("the workers ended before they met this server; see what they said") from None
        addresses.append(box[0])
    return addresses


class _Clerk:
    """Does what a round of messages asks for."""

    def __init__(self, desk: Listener, owner: Owner, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._desk, self._owner, self._facts = desk, owner, facts
        self._layouts: dict[int, Layout] = {}
        self._read: dict[int, Contents] = {}  # of the round that is being heard, by worker
        self._steps = 0

    def round(self) -> bool:
        """Hear one round and answer it; False when the workers are done."""
        self._read = {}
        heard = self._desk.hear(self._arrived)
        if not heard:
            return False
        about = next(iter(heard.values()))
        self._desk.answer(self._reply(about, heard), about)
        return about.kind != CLOSE

    def _reply(self, about: Message, heard: Mapping[int, Message]) -> bytes | dict[int, bytes]:
        if about.kind in (LAYOUT, PARTS):
            self._steps = max(self._steps, about.step + 1)
            return self._answer(about, heard)
        elif about.kind in (SUM, TOTAL):
            return _total(heard)
        elif about.kind == STATE:
            packed = io.BytesIO()
            torch.save(self._owner.state_dict(), packed)
            return {rank: packed.getvalue() if place == 0 else b"" for place, rank in enumerate(self._desk.living)}
        elif about.kind == ECHO:
            return next((bytes(message.payload) for message in heard.values() if message.payload), b"")
        elif about.kind == LOAD:
            given = next((bytes(message.payload) for message in heard.values() if message.payload), None)
            if given is not None:
                self._owner.load_state_dict(torch.load(io.BytesIO(given), weights_only=True))
        elif about.kind == STATS:
            return json.dumps({**self.stats().as_dict(), **self._facts()}).encode()
        return b""

    def _arrived(self, rank: int, message: Message) -> None:
        """Read a part while those of others are still on their way."""
        if message.kind in (LAYOUT, PARTS):
            part = message.payload
            if message.kind == LAYOUT:
                self._layouts[message.bucket], part = without_layout(part)
            layout = self._layouts[message.bucket]
            about = {"step": message.step, "bucket": message.bucket}
            try:
                self._read[rank] = self._owner.read(from_bytes(part), layout, **about, peer=rank)
            except FrameError as error:
                self._desk.fail(error)

    def _answer(self, about: Message, heard: Mapping[int, Message]) -> bytes:
        told = {rank: self._read[rank] for rank in heard}
        answer = self._owner.answer_to(told, self._layouts[about.bucket], step=about.step, bucket=about.bucket)
        return to_bytes(answer)

    def stats(self) -> ServerStats:
        traffic = self._desk.traffic
        return ServerStats(
            steps=self._steps,
            num_workers=self._desk.num_workers,
            lost=dict(self._desk.lost),
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            held_bytes=self._owner.num_bytes,
        )


def _total(heard: Mapping[int, Message]) -> bytes:
    """The sum of what all sent, in rank order; a payload begins with the name of its type."""
    total = None
    for message in heard.values():
        name = bytes(message.payload[:16]).decode().strip()
        mine = from_bytes(message.payload[16:], getattr(torch, name))
        total = mine if total is None else total + mine
    assert total is not None
    return to_bytes(total)
