"""Point to point, without a barrier: one worker asks another, whose mailbox thread answers while it trains on."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import LaunchError, PeerError
from laconic.exchange.group import spans_world
from laconic.exchange.traffic import Count, Traffic

Answer = Callable[[int, Tensor, int], Tensor]  # (who asks, what it says, bytes it awaits) -> what it is told
Combine = Callable[[list[Tensor]], Tensor]
_Talk = Callable[[list[Tensor], int, int], dist.Work]  # a group's send or recv

# Gloo closes every pair of a group when one wait on it times out, so nothing here ever does; 24.8 days overflow it.
_NEVER = timedelta(days=20)
_LAST_RESORT = 120  # times the patience: the longest wait at a meeting of a worker that has lost the first of them
_KNOCK, _BODY, _REPLY, _UP, _DOWN = range(5)  # tags
_ASKS, _PROBES = 0, 1  # what a knock is for
_HELD_KNOCKS = 64  # at one per `patience_s`, enough for any pause that TCP survives
_KNOCK_WORDS = 3  # int64: what for, the bytes that follow, and those of the answer


class Mailbox(Protocol):
    """One worker's end of a network on which any worker may ask any other at any time."""

    rank: int
    num_workers: int
    traffic: Traffic

    def serve(self, answer: Answer) -> None:
        """Answer whoever asks from now on, in threads of the mailbox's own."""

    def ask(self, peer: int, said: Tensor, num_bytes: int) -> Tensor:
        """The `num_bytes` that `peer` answers; PeerError if it has died. A slow peer is waited for."""

    def meet(self, mine: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """combine(the tensors of all that are alive, in rank order), equal on each; uncounted if it has no kind."""

    def close(self) -> None:
        """Say no more."""


class GlooMailbox:
    """Over a Gloo group of its own; messages are uint8 on the CPU.

    A knock of 24 bytes may come from any source. What follows it is received from its sender alone, in a thread of
    its own, so that a slow peer holds up nobody else.
    """

    def __init__(self, group: dist.ProcessGroup, patience_s: float) -> None:
        self.rank, self.num_workers = group.rank(), group.size()
        self.traffic = Traffic({"model": Count(), "average": Count()})  # of no new kinds while another thread reads it
        self._group, self._patience_s = group, patience_s
        self._lost: set[int] = set()
        self._counting = threading.Lock()
        self._knocks: dict[int, deque[dist.Work]] = {}  # Gloo drops what nobody holds
        self._closed = False

    def serve(self, answer: Answer) -> None:
        threading.Thread(target=self._serve, args=(answer,), name="laconic-mailbox", daemon=True).start()

    def _serve(self, answer: Answer) -> None:
        failures = 0
        while failures <= self.num_workers:  # more than there are peers to lose: the group itself is gone
            knock = torch.empty(_KNOCK_WORDS, dtype=torch.int64)
            try:
                work = self._group.recv_anysource([knock], _KNOCK)
                work.wait()
            except RuntimeError:
                failures += 1
                continue
            purpose, *lengths = knock.tolist()
            if purpose == _ASKS and not self._closed:
                arguments = (work._source_rank(), *lengths, answer)
                threading.Thread(target=self._answer, args=arguments, name="laconic-answer", daemon=True).start()

    def _answer(self, peer: int, bytes_in: int, bytes_out: int, answer: Answer) -> None:
        """In a thread that is left behind if the peer dies half-way: who asks it anew, finds out."""
        message = torch.empty(bytes_in, dtype=torch.uint8)
        with suppress(PeerError):
            self._finish(self._begin(self._group.recv, peer, message, _BODY), peer)
            reply = torch.zeros(bytes_out, dtype=torch.uint8)  # which a defect in `answer` leaves: nothing was taken
            try:
                reply = answer(peer, message, bytes_out)
            finally:
                self._finish(self._begin(self._group.send, peer, reply, _REPLY), peer)
            self._count("model", reply.nbytes, bytes_in)

    def ask(self, peer: int, said: Tensor, num_bytes: int) -> Tensor:
        self._knock(peer, _ASKS, said.nbytes, num_bytes)
        sent = self._begin(self._group.send, peer, said, _BODY)
        reply = self._receive(peer, num_bytes, _REPLY)  # which comes after all has been sent
        self._finish(sent, peer)
        self._count("model", said.nbytes, reply.nbytes)
        return reply

    def meet(self, mine: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """The lowest rank that is alive combines for all; the next takes its place when it is not.

        A worker without a way to a first rank that lives would wait for one who follows that, so its waiting ends.
        """
        said = mine.contiguous().view(-1).view(torch.uint8)
        for leader in range(self.rank):
            longest_s = math.inf if leader == 0 else _LAST_RESORT * self._patience_s
            with suppress(PeerError):
                self._deliver(leader, said, _UP, longest_s)
                (num_bytes,) = self._receive(leader, 8, _DOWN, longest_s).view(torch.int64).tolist()
                told = self._receive(leader, num_bytes, _DOWN)
                self._count(kind, said.nbytes, told.nbytes)
                return told.view(mine.dtype)
        heard = {self.rank: mine}
        for peer in range(self.rank + 1, self.num_workers):
            with suppress(PeerError):
                heard[peer] = self._receive(peer, said.nbytes, _UP).view(mine.dtype).view(mine.shape)
        result = combine([heard[rank] for rank in sorted(heard)])
        told = result.contiguous().view(-1).view(torch.uint8)
        for peer in heard:
            if peer != self.rank:
                with suppress(PeerError):
                    self._deliver(peer, torch.tensor([told.nbytes]).view(torch.uint8), _DOWN)
                    self._deliver(peer, told, _DOWN)
                    self._count(kind, told.nbytes, said.nbytes)
        return told.view(mine.dtype)

    def close(self) -> None:
        """The thread that waits for knocks waits on, for nobody: Gloo has no way to end it, and needs none."""
        self._closed = True

    def _knock(self, peer: int, purpose: int, bytes_out: int = 0, bytes_in: int = 0) -> None:
        work = self._begin(self._group.send, peer, torch.tensor([purpose, bytes_out, bytes_in]), _KNOCK)
        self._knocks.setdefault(peer, deque(maxlen=_HELD_KNOCKS)).append(work)

    def _deliver(self, peer: int, message: Tensor, tag: int, longest_s: float = math.inf) -> None:
        self._wait(self._begin(self._group.send, peer, message, tag), peer, longest_s)

    def _receive(self, peer: int, num_bytes: int, tag: int, longest_s: float = math.inf) -> Tensor:
        message = torch.empty(num_bytes, dtype=torch.uint8)
        self._wait(self._begin(self._group.recv, peer, message, tag), peer, longest_s)
        return message

    def _begin(self, talk: _Talk, peer: int, message: Tensor, tag: int) -> dist.Work:
        """Start sending or receiving a message."""
        if peer in self._lost:
            raise PeerError(f"rank {peer} was lost before")
        try:
            return talk([message], peer, tag)
        except RuntimeError as error:
            raise self._gone(peer, error) from None

    def _finish(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._gone(peer, error) from None

    def _wait(self, work: dist.Work, peer: int, longest_s: float) -> None:
        """Wait for as long as the peer is there, or `longest_s`.

        A message whose sender dies half-way leaves Gloo waiting for ever, but the next send on that pair fails: so the
        waiting is a thread's, which is then left behind, and a knock each `patience_s` finds out.
        """
        failed: list[PeerError] = []

        def wait() -> None:
            try:
                self._finish(work, peer)
            except PeerError as error:
                failed.append(error)

        waiting = threading.Thread(target=wait, name="laconic-wait", daemon=True)
        waiting.start()
        until = time.monotonic() + longest_s
        while True:
            waiting.join(self._patience_s)
            if not waiting.is_alive():
                break
            self._knock(peer, _PROBES)
            if time.monotonic() > until:
                raise LaunchError(
                    f"rank {self.rank} waited {longest_s:.0f} s to meet rank {peer} and has lost rank "
                    f"{', '.join(map(str, sorted(self._lost)))}; mend its links and resume from a checkpoint"
                )
        if failed:
            raise failed[0]

    def _gone(self, peer: int, error: RuntimeError) -> PeerError:
        self._lost.add(peer)
        cause = str(error).rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0]  # Gloo's first sentence
        return PeerError(f"rank {peer} is gone ({cause or type(error).__name__})")

    def _count(self, kind: str | None, bytes_out: int, bytes_in: int) -> None:
        if kind is not None:
            with self._counting:
                self.traffic.count(kind, bytes_out, bytes_out, bytes_in)


def open_mailbox(like: dist.ProcessGroup | None, patience_s: float) -> GlooMailbox:
    """A mailbox over the ranks of a group, or of all; a call that all of those ranks make."""
    like = like or dist.group.WORLD
    assert isinstance(like, dist.ProcessGroup)
    group = dist.new_group(
        ranks=dist.get_process_group_ranks(like),
        timeout=_NEVER,
        backend="gloo",
        use_local_synchronization=not spans_world(like),
    )
    assert isinstance(group, dist.ProcessGroup)
    return GlooMailbox(group, patience_s)
