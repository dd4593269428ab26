"""serve(scheme): what a rank does that holds no data, and answers for entries instead."""

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

from laconic.errors import FrameError, SchemeError, check_timeout
from laconic.fault_points import fault_point
from laconic.layout import Layout
from laconic.recipes import parse
from laconic.scheme import AnyScheme, Scheme
from laconic.server.client import without_layout
from laconic.server.listener import Listener
from laconic.server.owner import Owner
from laconic.transport import (
    Kind,
    Message,
    check_connected,
    exchange_addresses,
    longest_message,
    pack,
    payload_of,
    unpack,
    world,
)
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
    wait_budget_s: float | None = None,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> ServerStats:
    """Answer the workers until they are done; a call of each rank in `servers` while all others attach or follow.

    Args:
        scheme: what the workers run.
        servers: the ranks that serve, this one among them.
        timeout_s: a worker that is gone, or lets the others wait for longer, is left behind: means and votes are over
            the others from then on.
        wait_budget_s: for outer steps under one server, a worker that is late by more is not waited for, but lives:
            its drift comes later.
        facts: what workers that ask for the stats get beside them.

    Returns:
        The account of this server's answers.

    Raises:
        SchemeError: where the scheme has no server, or no worker can be late.
        FrameError: where the workers' schemes or models differ, on all of them too.

    Example:
        stats = laconic.serve("topk:rho=0.01,exchange=server", servers=[0])
    """
    check_timeout(timeout_s)
    check_wait(scheme, wait_budget_s, len(servers))
    made = parse(scheme)
    scheme = served_scheme(made)
    listener = Listener(
        world().size() - len(servers),
        timeout_s,
        wait_budget_s=math.inf if wait_budget_s is None else wait_budget_s,
        unit="outer step" if made.of_what == "drift" else "step",
    )
    exchange_addresses(servers, listener.address)
    by_rank = {rank: _terms(rank, text, listener) for rank, text in _accept(listener).items()}
    for rank, terms in by_rank.items():
        if terms["scheme"] != str(scheme):
            listener.fail(
                FrameError(f"worker {rank} runs {terms['scheme']}, this server {scheme}; give all the same scheme")
            )
        if terms["longest"] != by_rank[0]["longest"]:
            listener.fail(FrameError(f"worker {rank} has another model than worker 0; give all the same model"))
    listener.longest = by_rank[0]["longest"]
    wanted = {name: any(terms[name] for terms in by_rank.values()) for name in ("undoes", "holds_idle")}
    owner = Owner(scheme, servers.index(world().rank()), len(servers), **wanted)
    with ThreadPoolExecutor(listener.num_workers) as readers:
        handler = _RequestHandler(listener, owner, facts, readers)
        try:
            while listener.living and handler.handle_round():
                pass
        finally:
            listener.close()
    return handler.stats()


def _accept(listener: Listener) -> dict[int, str]:
    """The terms of all workers, by rank; LaunchError, on all ranks, as soon as one of them fails to connect."""
    with ThreadPoolExecutor(1) as beside:
        accepting = beside.submit(listener.accept)
        try:
            check_connected("", is_server=True)
        except BaseException:
            listener.stop_accepting()
            raise
        return accepting.result()


def served_scheme(scheme: AnyScheme | str) -> Scheme:
    """The scheme, if dedicated servers can answer it."""
    made = parse(scheme)
    if not made.has_owners:
        raise SchemeError(f"{made} asks no server; give one with exchange=Server(), or leave the servers out")
    return made.exchanged


def check_wait(scheme: AnyScheme | str, wait_budget_s: float | None, num_servers: int) -> None:
    """An error where nobody can be late."""
    if wait_budget_s is None:
        return
    made = parse(scheme)
    if made.of_what != "drift":
        raise SchemeError(f"{made} has no outer steps, and a gradient cannot come later; leave the wait budget out")
    if not 0 <= wait_budget_s < math.inf:
        raise SchemeError(f"the wait budget is {wait_budget_s}; give seconds, 0 to wait for nobody")
    if num_servers != 1:
        raise SchemeError(f"a wait budget is one server's, which tells who is late, not that of {num_servers}; use one")


def worker_terms(scheme: Scheme, *, undoes: bool, holds_idle: bool, longest: int = longest_message()) -> str:
    """The terms on which a worker is to be answered, which it sends in its handshake."""
    return json.dumps({"scheme": str(scheme), "undoes": undoes, "holds_idle": holds_idle, "longest": longest})


_TERMS = {"scheme": str, "undoes": bool, "holds_idle": bool, "longest": int}


def _terms(rank: int, text: str, listener: Listener) -> dict[str, Any]:
    """A worker's terms, if they are such."""
    with suppress(ValueError, RecursionError):
        terms = json.loads(text)
        if isinstance(terms, dict) and {name: type(value) for name, value in terms.items()} == _TERMS:
            return terms
    listener.fail(FrameError(f"worker {rank} came with other terms; run the same release of laconic on all ranks"))


@dataclass
class _RequestHandler:
    """Does what a round of messages asks for."""

    listener: Listener
    owner: Owner
    facts: Callable[[], Mapping[str, Any]]
    readers: Executor  # so that the link is never idle while a part is being read, or an answer found
    layouts: dict[int, Layout] = field(default_factory=dict)  # by bucket
    contents: dict[int, Future[Contents]] = field(default_factory=dict)  # of the round that comes in, by worker
    num_steps: int = 0

    def handle_round(self) -> bool:
        """Receive one round and reply to it; False when the workers are done."""
        fault_point("server.round")
        self.contents = {}
        received = self.listener.receive_round(self._on_arrival)
        if not received:
            return False
        about = next(iter(received.values()))
        self.listener.reply(self._reply(about, received), about)
        return about.kind != Kind.CLOSE

    def _reply(self, about: Message, received: Mapping[int, Message]) -> Tensor | dict[int, Tensor]:
        if about.kind in (Kind.LAYOUT, Kind.PARTS):
            return self._answer(about, received)
        if about.kind in (Kind.SUM, Kind.TOTAL, Kind.AVERAGE):
            return self._sum(about, received)
        sender = next((rank for rank, message in received.items() if message.payload.numel()), next(iter(received)))
        payload = received[sender].payload
        if about.kind == Kind.ECHO:
            return payload
        if about.kind == Kind.STATE:
            packed = pack(self.owner.state_dict())
            first = min(self.listener.living, default=-1)
            return {rank: packed if rank == first else payload_of(b"") for rank in self.listener.living}
        if about.kind == Kind.LOAD and payload.numel():
            try:
                self.owner.load_state_dict(unpack(payload))
            except Exception as error:  # which are many: a state may hold anything
                self._refuse(sender, f"a state that cannot be loaded ({type(error).__name__})")
        if about.kind == Kind.STATS:
            return payload_of(json.dumps({**self.stats().as_dict(), **self.facts()}).encode())
        return payload_of(b"")

    def _answer(self, about: Message, received: Mapping[int, Message]) -> Tensor:
        """The owner's answer to the parts of a bucket."""
        self.num_steps = max(self.num_steps, about.step + 1)
        try:
            contents = {rank: self.contents[rank].result() for rank in received}
        except FrameError as error:
            self.listener.fail(error)
        layout = self.layouts[about.bucket]
        answer = self.readers.submit(self.owner.answer_to, contents, layout, step=about.step, bucket=about.bucket)
        self.listener.send_until(answer)
        return answer.result().cpu()

    def _sum(self, about: Message, received: Mapping[int, Message]) -> Tensor:
        """The sum of all payloads, in rank order; scaled to the living, where some of those are late."""
        for rank, message in received.items():
            theirs = message.payload
            if (theirs.dtype, theirs.numel()) != (about.payload.dtype, about.payload.numel()):
                self._refuse(rank, f"{theirs.numel()} {theirs.dtype} to add up, the others did not")
        total = reduce(torch.add, (message.payload for message in received.values()))
        num_living = len(self.listener.living)  # over which it is, as workers take it
        return total if len(received) == num_living else total * (num_living / len(received))

    def _on_arrival(self, rank: int, message: Message) -> None:
        """Read a part while those of others are still on their way."""
        if message.kind not in (Kind.LAYOUT, Kind.PARTS):
            return
        part = message.payload
        layout = self.layouts.get(message.bucket)
        if message.kind == Kind.LAYOUT:
            layout = None
            with suppress(ValueError, TypeError, RecursionError):
                layout, part = without_layout(part, self.listener.longest // 16)
            if not self.contents:  # the first of a round has the layout that the others must have
                self.layouts.pop(message.bucket, None)
            if layout is not None and self.layouts.setdefault(message.bucket, layout) != layout:
                layout = None
        self.contents[rank] = self.readers.submit(self._read, rank, message, layout, part)

    def _read(self, rank: int, message: Message, layout: Layout | None, part: Tensor) -> Contents:
        """The contents of a worker's part of a bucket of this layout; FrameError, which names it, if that cannot be."""
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
            lost=self.listener.lost,
            late=self.listener.late,
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            held_bytes=self.owner.num_bytes,
        )
