"""A mailbox between processes, over TCP connections of its own."""

import queue
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import FrameError, LaunchError, PeerError
from laconic.fault_points import fault_point
from laconic.transport.connection import Connection, Kind, Message, longest_message
from laconic.transport.door import meet
from laconic.transport.mailbox import QUESTION_HEAD_BYTES, Combine, OnAnswered, Reply, nobody_is_told
from laconic.transport.silence import SilenceWatch
from laconic.transport.traffic import Count, Traffic
from laconic.transport.transport import Collectives

_LAST_RESORT = 120  # times the patience: when waiting for a leader that is not the first of all is given up
_GOODBYE_S = 5.0  # for a thread that is still answering


@dataclass
class TcpMailbox:
    """A connection to each peer, on which this worker asks, and one from each, on which it is asked.

    Each of the latter has a thread of its own: a slow peer holds up nobody else, and one that dies ends its own two
    connections. Messages are uint8 on the CPU. A peer that is waited for and does not even say that it lives, for
    `timeout_s`, is hung up on.
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
        self._talking = {peer: threading.Lock() for peer in self.to}  # one question at a time on each connection
        self._given: dict[int, queue.SimpleQueue[Message | None]] = {
            p: queue.SimpleQueue() for p in self.of
        }  # to combine
        self._num_combined = 0
        self._last_result = torch.empty(0, dtype=torch.uint8)
        self._lost: dict[int, str] = {}  # peers, and what was seen of it
        self._watch = SilenceWatch(self.rank, self.patience_s, self.timeout_s, self._say_alive, self._give_up)
        self._counting = threading.Lock()
        self._threads: list[threading.Thread] = []

    def listen(self, reply: Reply, answered: OnAnswered = nobody_is_told) -> None:
        self._watch.start()
        for peer in self.of:
            self._threads.append(threading.Thread(target=self._hear, args=(peer, reply, answered), daemon=True))
            self._threads[-1].start()

    def _hear(self, peer: int, reply: Reply, answered: OnAnswered) -> None:
        """Answer one peer until it hangs up; what it gives to combine is put where `combine_all` finds it."""
        connection = self.of[peer]
        try:
            while True:
                message = connection.receive({Kind.QUESTION: self.longest, Kind.COMBINE: self.longest, Kind.ECHO: 0})
                self._watch.note_heard(peer)
                if message.kind == Kind.ECHO:
                    continue
                if message.kind == Kind.COMBINE:
                    self._given[peer].put(message)
                    continue
                said = torch.zeros(message.reply_bytes, dtype=torch.uint8)  # which a defect leaves: nothing was taken
                try:
                    said = reply(peer, message.step, message.payload.view(torch.uint8), message.reply_bytes)
                except Exception:  # said, and the peer goes on
                    traceback.print_exc()
                connection.send_bytes(said)
                answered(peer, message.step)
                self._count("model", said.nbytes, message.num_bytes)
        except OSError:
            pass
        except FrameError as error:
            _say(f"rank {peer} {error}; it is heard no more")
        finally:
            self._given[peer].put(None)
            connection.shut_down()

    def ask(self, peer: int, turn: int, said: Tensor, num_bytes: int) -> Tensor:
        fault_point("gossip.request", peer)
        with self._connected(peer) as connection:
            connection.send(Message(Kind.QUESTION, turn, payload=said, reply_bytes=num_bytes))
            fault_point("gossip.sent", peer)
            reply = connection.receive_bytes(num_bytes)
        self._count("model", QUESTION_HEAD_BYTES + said.nbytes, num_bytes)
        return reply

    def combine_all(self, mine: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """The lowest rank that is alive combines for all; the next takes its place when it is not."""
        self._last_result = self._follow_or_lead(mine, combine, kind)
        self._num_combined += 1
        return self._last_result.view(mine.dtype)

    def _follow_or_lead(self, mine: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """The result, as bytes."""
        given = Message(Kind.COMBINE, self._num_combined, payload=_bytes_of(mine))
        for leader in range(self.rank):
            with suppress(PeerError), self._connected(leader) as connection:
                connection.send(given)
                told = self._told_by(leader, connection)
                if told.payload.nbytes % mine.element_size():
                    raise FrameError(f"told a result of {told.payload.nbytes} bytes")
                self._count(kind, given.num_bytes, told.num_bytes)
                return told.payload
        heard = [mine]
        followers = []
        for peer in range(self.rank + 1, self.num_workers):
            theirs = self._given_by(peer)
            if theirs is not None and theirs.payload.nbytes != mine.nbytes:
                _say(f"rank {peer} gave {theirs.payload.nbytes} bytes, not {mine.nbytes}; it is heard no more")
                self.of[peer].shut_down()
            elif theirs is not None:
                heard.append(theirs.payload.view(mine.dtype).view(mine.shape))
                followers.append(peer)
        result = _bytes_of(combine(heard))
        for peer in followers:
            self._count(kind, self._tell(peer, result), given.num_bytes)
        return result

    def _told_by(self, leader: int, connection: Connection) -> Message:
        """What the leader found.

        A worker without a way to a first rank that lives would wait for one who follows that, so its waiting ends.
        """
        last_resort_s = _LAST_RESORT * self.patience_s
        try:
            return connection.receive({Kind.COMBINE: self.longest}, None if leader == 0 else last_resort_s)
        except TimeoutError as error:
            if error.errno is not None:  # not ours: that of a host that is silent
                raise
            raise LaunchError(
                f"rank {self.rank} waited {last_resort_s:.0f} s to meet rank {leader} and has lost rank "
                f"{', '.join(map(str, sorted(self._lost)))}; mend its links and resume from a checkpoint"
            ) from None

    def _given_by(self, peer: int) -> Message | None:
        """What a peer gives this time, once it was told the last result, whose leader may be dead; None if gone."""
        with self._watch.waiting_for(peer):
            while message := self._given[peer].get():
                if message.step == self._num_combined:
                    return message
                self._tell(peer, self._last_result)
        self._given[peer].put(None)  # it will give nothing the next time either
        self._check_in()
        return None

    def _tell(self, peer: int, result: Tensor) -> int:
        """The bytes that took."""
        message = Message(Kind.COMBINE, payload=result)
        with suppress(OSError):  # whoever has died since will be missed the next time
            self.of[peer].send(message)
        return message.num_bytes

    def close(self) -> None:
        """Hang up; threads that wait for a peer find that out."""
        self._watch.close()
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
            with self._talking[peer], self._watch.waiting_for(peer):
                yield self.to[peer]
        except (OSError, FrameError) as error:
            self._check_in()
            why = error.strerror or error if isinstance(error, OSError) else f"it {error}"
            how = self._lost.setdefault(peer, f"is gone ({why})")
            raise PeerError(f"rank {peer} {how}") from None

    def _say_alive(self) -> None:
        """Tell it to all who are not just being asked."""
        for peer, connection in self.to.items():
            if peer not in self._lost and self._talking[peer].acquire(blocking=False):
                with suppress(OSError):  # whoever asks it next finds that out
                    connection.send(Message(Kind.ECHO))
                self._talking[peer].release()

    def _give_up(self, peer: int, why: str) -> None:
        """Hang up on one who says nothing; whoever waits for it finds that out."""
        self._lost[peer] = why
        self.to[peer].shut_down()
        self.of[peer].shut_down()

    def _check_in(self) -> None:
        """An error where peers are gone because this process stood still, and they went on without it."""
        if self._watch.was_given_up:
            raise LaunchError(
                f"rank {self.rank} stood still for {self._watch.stood_still_s:.0f} s, and the others have gone on "
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
    to, of = meet(transport.rank, transport.tell_all, calls=others, awaits=others)
    return TcpMailbox(transport.rank, to, of, patience_s, timeout_s, longest)


def _say(text: str) -> None:
    print(f"laconic: {text}", file=sys.stderr, flush=True)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
