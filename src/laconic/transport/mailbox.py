"""Point to point, without a barrier: one worker sends another a request, which that one answers while it trains on."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic.errors import FrameError, LaunchError, PeerError
from laconic.fault_points import fault_point
from laconic.transport.connection import HEAD_BYTES, Connection, Kind, Message, longest_message
from laconic.transport.rendezvous import open_connections
from laconic.transport.traffic import Count, Traffic
from laconic.transport.transport import Collectives

_LOG = logging.getLogger("laconic.transport")
_LAST_RESORT = 120  # times the patience: when waiting for a leader that is not the first of all is given up
_GOODBYE_S = 5.0  # for a thread that is still replying
_SHORTEST_TICK_S = 0.05  # between two heartbeats

Reply = Callable[[int, int, Tensor, int], Tensor]  # (peer, its turn, its request, bytes it awaits) -> those
OnAnswered = Callable[[int, int], object]  # (peer, its turn)
Combine = Callable[[list[Tensor]], Tensor]

REQUEST_HEAD_BYTES = HEAD_BYTES  # before a request: its kind, its turn, its length and that of the reply


@dataclass(eq=False)
class _Wait:
    peer: int
    silent_s: float = 0.0  # since it began, or since the peer's last message
    is_logged: bool = False


class HeartbeatMonitor:
    """A thread that sends this process's heartbeats, and drops peers that are waited for and send nothing.

    A warning after `warn_s`, dropped after `timeout_s`. Only time that this process has lived through counts: where a
    whole job is stopped and continued, nobody is dropped. A process that stood still alone was: see `stood_still_s`.
    """

    def __init__(
        self, rank: int, warn_s: float, timeout_s: float, beat: Callable[[], None], drop: Callable[[int, str], None]
    ) -> None:
        self.stood_still_s = 0.0  # the longest that this process did
        self._rank = rank
        self._warn_s = warn_s
        self._timeout_s = timeout_s
        self._tick_s = max(_SHORTEST_TICK_S, min(warn_s, timeout_s) / 2)
        self._beat = beat
        self._drop = drop
        self._waits: list[_Wait] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="laconic-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def waiting_for(self, peer: int) -> Iterator[None]:
        """Drop this peer if it sends nothing meanwhile."""
        wait = _Wait(peer)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def note_alive(self, peer: int) -> None:
        """Note that a message of this peer came."""
        for wait in list(self._waits):
            if wait.peer == peer:
                wait.silent_s = 0.0
                wait.is_logged = False

    @property
    def was_dropped(self) -> bool:
        """Return whether peers that closed their connections may have done so because this process stood still."""
        return self.stood_still_s > self._timeout_s / 2

    def _watch(self) -> None:
        while not self._over.is_set():
            since = time.monotonic()
            self._over.wait(self._tick_s)
            self.stood_still_s = max(self.stood_still_s, time.monotonic() - since - self._tick_s)
            self._beat()
            for wait in list(self._waits):
                self._judge(wait)

    def _judge(self, wait: _Wait) -> None:
        wait.silent_s += self._tick_s
        if wait.silent_s >= self._timeout_s:
            self._drop(wait.peer, f"has sent nothing for {self._timeout_s:g} s")
        elif wait.silent_s >= self._warn_s and not wait.is_logged:
            wait.is_logged = True
            silent = f"rank {wait.peer} has sent nothing for {self._warn_s:g} s"
            warn(self._rank, f"{silent}; it is waited for, and dropped after {self._timeout_s:g}")


def warn(rank: int, message: str) -> None:
    """Log a warning of one rank's."""
    _LOG.warning("rank %d: %s", rank, message)


class Mailbox(Protocol):
    """One worker's end of a network on which any worker may ask any other at any time."""

    rank: int
    num_workers: int
    traffic: Traffic

    def listen(self, reply: Reply, answered: OnAnswered = lambda peer, turn: None) -> None:
        """Reply to all requests from now on, in threads of the mailbox's own; `answered` is called after each."""

    def ask(self, peer: int, turn: int, request: Tensor, num_bytes: int) -> Tensor:
        """The `num_bytes` that `peer` replies; PeerError if it has died or hangs. A slow peer is waited for."""

    def combine_all(self, own: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """combine(the tensors of all that are alive, in rank order), equal on each; uncounted if it has no kind."""

    def close(self) -> None:
        """Close all connections."""


@dataclass
class TcpMailbox:
    """A connection to each peer, for this worker's requests, and one from each, for theirs.

    Each of the latter has a thread of its own: a slow peer holds up nobody else, and one that dies ends its own two
    connections. Messages are uint8 on the CPU. A peer that is waited for and sends no heartbeat for `timeout_s` is
    dropped.
    """

    rank: int
    to: Mapping[int, Connection]
    of: Mapping[int, Connection]
    patience_s: float
    timeout_s: float
    longest: int = longest_message()  # bytes of a message that a peer may send, or ask for

    def __post_init__(self) -> None:
        self.num_workers = len(self.to) + 1
        self.traffic = Traffic({"model": Count(), "average": Count()})  # of no new kinds while another thread reads it
        self._in_use = {peer: threading.Lock() for peer in self.to}  # one request at a time on each connection
        self._to_combine: dict[int, queue.SimpleQueue[Message | None]] = {p: queue.SimpleQueue() for p in self.of}
        self._num_combined = 0
        self._last_result = torch.empty(0, dtype=torch.uint8)
        self._lost: dict[int, str] = {}  # peer -> why
        self._monitor = HeartbeatMonitor(self.rank, self.patience_s, self.timeout_s, self._beat, self._drop)
        self._counting = threading.Lock()
        self._threads: list[threading.Thread] = []

    def listen(self, reply: Reply, answered: OnAnswered = lambda peer, turn: None) -> None:
        self._monitor.start()
        for peer in self.of:
            self._threads.append(threading.Thread(target=self._serve, args=(peer, reply, answered), daemon=True))
            self._threads[-1].start()

    def _serve(self, peer: int, reply: Reply, answered: OnAnswered) -> None:
        """Reply to one peer until it is gone; what it sends to combine is put where `combine_all` takes it."""
        connection = self.of[peer]
        try:
            while True:
                message = connection.receive({Kind.REQUEST: self.longest, Kind.COMBINE: self.longest, Kind.ECHO: 0})
                self._monitor.note_alive(peer)
                if message.kind == Kind.ECHO:
                    continue
                if message.kind == Kind.COMBINE:
                    self._to_combine[peer].put(message)
                    continue
                answer = torch.zeros(message.reply_bytes, dtype=torch.uint8)  # which a defect leaves: a refusal
                try:
                    answer = reply(peer, message.step, message.payload.view(torch.uint8), message.reply_bytes)
                except Exception:  # the peer trains on
                    _LOG.exception("rank %d: the request of rank %d failed", self.rank, peer)
                connection.send_bytes(answer)
                answered(peer, message.step)
                self._count("model", answer.nbytes, message.num_bytes)
        except OSError:
            pass
        except FrameError as error:
            _LOG.warning("rank %d %s; its messages are dropped from now on", peer, error)
        finally:
            self._to_combine[peer].put(None)
            connection.shut_down()

    def ask(self, peer: int, turn: int, request: Tensor, num_bytes: int) -> Tensor:
        fault_point("gossip.request", peer)
        with self._connected(peer) as connection:
            connection.send(Message(Kind.REQUEST, turn, payload=request, reply_bytes=num_bytes))
            fault_point("gossip.sent", peer)
            reply = connection.receive_bytes(num_bytes)
        self._count("model", REQUEST_HEAD_BYTES + request.nbytes, num_bytes)
        return reply

    def combine_all(self, own: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """The lowest rank that is alive combines for all; the next takes its place when it is not."""
        self._last_result = self._follow_or_lead(own, combine, kind)
        self._num_combined += 1
        return self._last_result.view(own.dtype)

    def _follow_or_lead(self, own: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """The result, as bytes."""
        message = Message(Kind.COMBINE, self._num_combined, payload=_bytes_of(own))
        for leader in range(self.rank):
            with suppress(PeerError), self._connected(leader) as connection:
                connection.send(message)
                answer = self._receive_result(leader, connection)
                if answer.payload.nbytes % own.element_size():
                    raise FrameError(f"sent a result of {answer.payload.nbytes} bytes")
                self._count(kind, message.num_bytes, answer.num_bytes)
                return answer.payload
        tensors = [own]
        followers = []
        for peer in range(self.rank + 1, self.num_workers):
            theirs = self._receive_share(peer)
            if theirs is not None and theirs.payload.nbytes != own.nbytes:
                given = f"{theirs.payload.nbytes} bytes, not {own.nbytes}"
                _LOG.warning("rank %d gave %s to combine; its messages are dropped from now on", peer, given)
                self.of[peer].shut_down()
            elif theirs is not None:
                tensors.append(theirs.payload.view(own.dtype).view(own.shape))
                followers.append(peer)
        result = _bytes_of(combine(tensors))
        for peer in followers:
            self._count(kind, self._send_result(peer, result), message.num_bytes)
        return result

    def _receive_result(self, leader: int, connection: Connection) -> Message:
        """The leader's result.

        A worker that has lost a first rank which others still follow would wait for ever, so its waiting ends.
        """
        last_resort_s = _LAST_RESORT * self.patience_s
        try:
            return connection.receive({Kind.COMBINE: self.longest}, None if leader == 0 else last_resort_s)
        except TimeoutError as error:
            if error.errno is not None:  # not ours: the kernel's, of a dead host
                raise
            raise LaunchError(
                f"rank {self.rank} waited {last_resort_s:.0f} s for rank {leader} and has lost rank "
                f"{', '.join(map(str, sorted(self._lost)))}; mend its links and resume from a checkpoint"
            ) from None

    def _receive_share(self, peer: int) -> Message | None:
        """A peer's message for this time, after the last result if it lacks that, as its leader died; None if gone."""
        with self._monitor.waiting_for(peer):
            while message := self._to_combine[peer].get():
                if message.step == self._num_combined:
                    return message
                self._send_result(peer, self._last_result)
        self._to_combine[peer].put(None)  # for the next time, too
        self._check_in()
        return None

    def _send_result(self, peer: int, result: Tensor) -> int:
        """Returns the bytes that this takes."""
        message = Message(Kind.COMBINE, payload=result)
        with suppress(OSError):  # a peer that has died since is missed the next time
            self.of[peer].send(message)
        return message.num_bytes

    def close(self) -> None:
        """Close all connections; threads that wait for a peer find that out."""
        self._monitor.close()
        connections = (*self.to.values(), *self.of.values())
        for connection in connections:
            connection.shut_down()
        for thread in self._threads:  # one that outlives the interpreter by a moment would abort the process
            thread.join(_GOODBYE_S)
        for connection in connections:
            connection.close()

    @contextmanager
    def _connected(self, peer: int) -> Iterator[Connection]:
        """The connection to a peer, for this thread alone; PeerError if it is gone."""
        if peer in self._lost:
            raise PeerError(f"rank {peer} was lost before")
        try:
            with self._in_use[peer], self._monitor.waiting_for(peer):
                yield self.to[peer]
        except (OSError, FrameError) as error:
            self._check_in()
            why = error.strerror or error if isinstance(error, OSError) else f"it {error}"
            how = self._lost.setdefault(peer, f"is gone ({why})")
            raise PeerError(f"rank {peer} {how}") from None

    def _beat(self) -> None:
        """Send a heartbeat to all peers to which no request is on its way."""
        for peer, connection in self.to.items():
            if peer not in self._lost and self._in_use[peer].acquire(blocking=False):
                with suppress(OSError):  # the next request to it finds that out
                    connection.send(Message(Kind.ECHO))
                self._in_use[peer].release()

    def _drop(self, peer: int, why: str) -> None:
        """Close the connections of a peer that sends nothing; threads that wait for it find that out."""
        self._lost[peer] = why
        self.to[peer].shut_down()
        self.of[peer].shut_down()

    def _check_in(self) -> None:
        """Raise where peers are gone because this process stood still, and they went on without it."""
        if self._monitor.was_dropped:
            raise LaunchError(
                f"rank {self.rank} stood still for {self._monitor.stood_still_s:.0f} s, and the others have gone on "
                "without it; end them and resume from a checkpoint, or leave it out"
            )

    def _count(self, kind: str | None, bytes_out: int, bytes_in: int) -> None:
        if kind is not None:
            with self._counting:
                self.traffic.count(kind, bytes_out, bytes_out, bytes_in)


def open_mailbox(
    transport: Collectives, patience_s: float, timeout_s: float, longest: int = longest_message()
) -> TcpMailbox:
    """A mailbox among the workers of a transport, for messages of at most so many bytes; a call that all make."""
    others = [peer for peer in range(transport.num_workers) if peer != transport.rank]
    to, of = open_connections(
        transport.rank,
        transport.gather_small,
        calls=others,
        awaits=others,
        timeout_s=timeout_s,
        names=transport.world_ranks,
    )
    return TcpMailbox(transport.rank, to, of, patience_s, timeout_s, longest)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
