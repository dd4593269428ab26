"""serve(scheme): what a rank does that holds no data, and answers for entries instead."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any, NoReturn

import torch
from torch import Tensor

from laconic.errors import FrameError, SchemeError
from laconic.fault_points import fault_point
from laconic.layout import Layout
from laconic.recipes import parse
from laconic.scheme import AnyScheme, Scheme
from laconic.server.client import without_layout
from laconic.server.listener import Listener
from laconic.server.owner import Owner
from laconic.transport.collectives import exchange_addresses, world
from laconic.transport.connection import Kind, Message, longest_message, payload_of
from laconic.wire import Contents

TIMEOUT_S = 60.0  # a cable out for 20 s costs TCP up to 26 until it tries again


@dataclass(frozen=True)
class ServerStats:
    """A server's account of its answers."""

    steps: int  # of which it was asked for entries; of dense ones it is not
    num_workers: int
    lost: dict[int, str]  # worker -> how, and after which step
    late: dict[int, int]  # worker -> its messages that came when their round was over
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
    wait_s: float | None = None,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> ServerStats:
    """Answer the workers until they are done; a call of each rank in `servers` while all others attach or follow.

    A worker that hangs up, or lets the others wait for longer than `timeout_s`, is left behind: means and votes are
    over those from then on. With `wait_s`, for outer steps under one server, who is late by more than that is not
    waited for either, but lives: its drift comes later. `facts` are told beside the stats to workers that ask.
    """
    check_wait(scheme, wait_s, len(servers))
    scheme = served_scheme(scheme)
    listener = Listener(world().size() - len(servers), timeout_s, wait_s=math.inf if wait_s is None else wait_s)
    exchange_addresses(servers, listener.address)
    asked = {rank: _terms(rank, text, listener) for rank, text in listener.accept().items()}
    for rank, terms in asked.items():
        if terms["scheme"] != str(scheme):
            listener.fail(
                FrameError(f"worker {rank} runs {terms['scheme']}, this server {scheme}; give all the same scheme")
            )
        if terms["longest"] != asked[0]["longest"]:
            listener.fail(FrameError(f"worker {rank} has another model than worker 0; give all the same model"))
    listener.longest = asked[0]["longest"]
    wanted = {name: any(terms[name] for terms in asked.values()) for name in ("undoes", "holds_idle")}
    owner = Owner(scheme, servers.index(world().rank()), len(servers), **wanted)
    with ThreadPoolExecutor(listener.num_workers) as readers:
        handler = _RequestHandler(listener, owner, facts, readers)
        try:
            while listener.living and handler.handle_round():
                pass
        finally:
            listener.close()
    return handler.stats()


def served_scheme(scheme: AnyScheme | str) -> Scheme:
    """The scheme, if dedicated servers can answer it."""
    made = parse(scheme) if isinstance(scheme, str) else scheme
    if not made.has_owners:
        raise SchemeError(f"{made} asks no server; give one with exchange=Server(), or leave the servers out")
    return made.exchanged


def check_wait(scheme: AnyScheme | str, wait_s: float | None, num_servers: int) -> None:
    """An error where nobody can be late."""
    if wait_s is None:
        return
    made = parse(scheme) if isinstance(scheme, str) else scheme
    if made.of_what != "drift":
        raise SchemeError(f"{made} has no outer steps, and a gradient cannot come later; leave the wait budget out")
    if not 0 <= wait_s < math.inf:
        raise SchemeError(f"the wait budget is {wait_s}; give seconds, 0 to wait for nobody")
    if num_servers != 1:
        raise SchemeError(f"a wait budget is one server's, who says who is late, not that of {num_servers}; use one")


def greeting(scheme: Scheme, *, undoes: bool, holds_idle: bool, longest: int = longest_message()) -> str:
    """What a worker says to a server when it comes: the terms on which it is to be answered."""
    return json.dumps({"scheme": str(scheme), "undoes": undoes, "holds_idle": holds_idle, "longest": longest})


_TERMS = {"scheme": str, "undoes": bool, "holds_idle": bool, "longest": int}


def _terms(rank: int, text: str, listener: Listener) -> dict[str, Any]:
    """A worker's terms, if they are such."""
    with suppress(ValueError):
        terms = json.loads(text)
        if isinstance(terms, dict) and {name: type(value) for name, value in terms.items()} == _TERMS:
            return terms
    listener.fail(FrameError(f"worker {rank} greets in other words; run the same release of laconic on all ranks"))


@dataclass
class _RequestHandler:
    """Does what a round of messages asks for."""

    listener: Listener
    owner: Owner
    facts: Callable[[], Mapping[str, Any]]
    readers: Executor  # so that the link is never idle while a part is being read, or an answer found
    layouts: dict[int, Layout] = field(default_factory=dict)  # by bucket
    contents: dict[int, Future[Contents]] = field(default_factory=dict)  # of the round that is heard, by worker
    num_steps: int = 0

    def handle_round(self) -> bool:
        """Hear one round and answer it; False when the workers are done."""
        fault_point("server.round")
        self.contents = {}
        heard = self.listener.hear(self._arrived)
        if not heard:
            return False
        about = next(iter(heard.values()))
        self.listener.answer(self._reply(about, heard), about)
        return about.kind != Kind.CLOSE

    def _reply(self, about: Message, heard: Mapping[int, Message]) -> Tensor | dict[int, Tensor]:
        if about.kind in (Kind.LAYOUT, Kind.PARTS):
            self.num_steps = max(self.num_steps, about.step + 1)
            try:
                told = {rank: self.contents[rank].result() for rank in heard}
            except FrameError as error:
                self.listener.fail(error)
            layout = self.layouts[about.bucket]
            answer = self.readers.submit(self.owner.answer_to, told, layout, step=about.step, bucket=about.bucket)
            self.listener.send_until(answer)
            return answer.result().cpu()
        if about.kind in (Kind.SUM, Kind.TOTAL, Kind.AVERAGE):
            for rank, message in heard.items():
                theirs = message.payload
                if (theirs.dtype, theirs.numel()) != (about.payload.dtype, about.payload.numel()):
                    self._refuse(rank, f"{theirs.numel()} {theirs.dtype} to add up, the others did not")
            total = reduce(torch.add, (message.payload for message in heard.values()))  # in rank order
            num_living = len(self.listener.living)  # over whom it is, as workers take it
            return total if len(heard) == num_living else total * (num_living / len(heard))
        giver = next((rank for rank, message in heard.items() if message.payload.numel()), next(iter(heard)))
        given = heard[giver].payload
        if about.kind == Kind.ECHO:
            return given
        if about.kind == Kind.STATE:
            packed = io.BytesIO()
            torch.save(self.owner.state_dict(), packed)
            first = min(self.listener.living, default=-1)
            return {rank: payload_of(packed.getvalue() if rank == first else b"") for rank in self.listener.living}
        if about.kind == Kind.LOAD and given.numel():
            try:
                self.owner.load_state_dict(torch.load(io.BytesIO(heard[giver].text), weights_only=True))
            except Exception as error:  # which are many: what it says may be anything
                self._refuse(giver, f"a state that cannot be loaded ({type(error).__name__})")
        if about.kind == Kind.STATS:
            return payload_of(json.dumps({**self.stats().as_dict(), **self.facts()}).encode())
        return payload_of(b"")

    def _arrived(self, rank: int, message: Message) -> None:
        """Read a part while those of others are still on their way."""
        if message.kind not in (Kind.LAYOUT, Kind.PARTS):
            return
        part = message.payload
        layout = self.layouts.get(message.bucket)
        if message.kind == Kind.LAYOUT:
            layout = None
            with suppress(ValueError, TypeError, RecursionError):
                layout, part = without_layout(part, self.listener.longest // 16)
            if not self.contents:  # the first of a round says what the others must say too
                self.layouts.pop(message.bucket, None)
            if layout is not None and self.layouts.setdefault(message.bucket, layout) != layout:
                layout = None
        self.contents[rank] = self.readers.submit(self._read, rank, message, layout, part)

    def _read(self, rank: int, message: Message, layout: Layout | None, part: Tensor) -> Contents:
        """What a worker says of a bucket of this layout; FrameError, which names it, if that cannot be."""
        if layout is None or part.dtype != torch.uint8:
            raise FrameError(
                f"worker {rank} sent {message} without the layout that the others have; give all one model"
            )
        return self.owner.read({rank: part}, layout, step=message.step, bucket=message.bucket)[rank]

    def _refuse(self, rank: int, what: str) -> NoReturn:
        self.listener.fail(FrameError(f"worker {rank} sent {what}; run the same script and release on all workers"))

    def stats(self) -> ServerStats:
        traffic = self.listener.traffic
        return ServerStats(
            steps=self.num_steps,
            num_workers=self.listener.num_workers,
            lost=dict(self.listener.lost),
            late=dict(self.listener.late),
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            held_bytes=self.owner.num_bytes,
        )
