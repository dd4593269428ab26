"""A mailbox between processes, over TCP connections of its own.

Not over Gloo: there a wait that times out closes every pair of its group, a message whose sender dies half-way is
waited for for ever, and a question takes three hand-shakes and two new threads: 2 to 4 ms of one that takes 8 in all
(75,770 entries, two busy processes on two cores).
"""

from __future__ import annotations

import json
import math
import queue
import secrets
import socket
import struct
import threading
import traceback
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from laconic.errors import LaunchError, PeerError
from laconic.transport.connection import WHICH_WAY, fill_, open_door, tuned
from laconic.transport.mailbox import QUESTION_HEAD_BYTES, Answer, Combine
from laconic.transport.traffic import Count, Traffic
from laconic.transport.transport import Collectives

_HEAD = struct.Struct("<4sIqqq")  # magic, what for, turn or meeting, the bytes that follow, and those of the answer
assert _HEAD.size == QUESTION_HEAD_BYTES
_MAGIC = b"LACM"
_ASKS, _MEETS = range(2)  # what for
_LENGTH = struct.Struct("<q")  # before what a meeting has found
_HELLO = struct.Struct("<32sq")  # token, rank

_LAST_RESORT = 120  # times the patience: when a meeting without the first of all is given up
_SILENCE = 60  # times the patience, or seconds if that is longer: when a host that says nothing is given up
_JOIN_TIMEOUT_S = 300.0  # between two that have just met elsewhere
_HELLO_TIMEOUT_S = 10.0
_CARD_BYTES = 256  # in which a worker says where it is
_KEEP_ALIVE_S = 30
_GOODBYE_S = 5.0  # for a thread that is still answering
_MORE = getattr(socket, "MSG_MORE", 0)  # a head goes with what follows it


class TcpMailbox:
    """A connection to each peer, on which this worker asks, and one from each, on which it is asked.

    Each of the latter has a thread of its own: a slow peer holds up nobody else, and one that dies ends its own two
    connections. Messages are uint8 on the CPU.
    """

    def __init__(
        self, rank: int, to: dict[int, socket.socket], of: dict[int, socket.socket], patience_s: float
    ) -> None:
        self.rank, self.num_workers = rank, len(to) + 1
        self.traffic = Traffic({"model": Count(), "average": Count()})  # of no new kinds while another thread reads it
        self._to, self._of = to, of
        self._talking = {peer: threading.Lock() for peer in to}  # one question at a time on each connection
        self._laid: dict[int, queue.SimpleQueue[tuple[int, Tensor] | None]] = {p: queue.SimpleQueue() for p in of}
        self._meeting = 0  # how many there were
        self._found = torch.empty(0, dtype=torch.uint8)  # what the last has found
        self._last_resort_s = _LAST_RESORT * patience_s
        self._lost: set[int] = set()
        self._counting = threading.Lock()
        self._threads: list[threading.Thread] = []
        for line in (*to.values(), *of.values()):
            _give_up_after(line, max(_SILENCE, _SILENCE * patience_s))

    def serve(self, answer: Answer) -> None:
        for peer in self._of:
            self._threads.append(threading.Thread(target=self._hear, args=(peer, answer), daemon=True))
            self._threads[-1].start()

    def _hear(self, peer: int, answer: Answer) -> None:
        """Answer one peer until it hangs up; what it brings to a meeting is laid where `meet` finds it."""
        line = self._of[peer]
        try:
            while True:
                magic, purpose, number, num_bytes, num_back = _HEAD.unpack(_bytes(_receive(line, QUESTION_HEAD_BYTES)))
                if magic != _MAGIC or num_bytes < 0 or num_back < 0:
                    break
                message = _receive(line, num_bytes)
                if purpose == _MEETS:
                    self._laid[peer].put((number, message))
                    continue
                reply = torch.zeros(num_back, dtype=torch.uint8)  # which a defect leaves: nothing was taken
                try:
                    reply = answer(peer, number, message, num_back)
                except Exception:  # said, and the peer goes on
                    traceback.print_exc()
                line.sendall(_bytes(reply))
                self._count("model", reply.nbytes, QUESTION_HEAD_BYTES + num_bytes)
        except OSError:
            pass
        finally:
            self._laid[peer].put(None)
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def ask(self, peer: int, turn: int, said: Tensor, num_bytes: int) -> Tensor:
        reply = self._say(peer, (_ASKS, turn), said, num_bytes)
        self._count("model", QUESTION_HEAD_BYTES + said.nbytes, num_bytes)
        return reply

    def meet(self, mine: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """The lowest rank that is alive combines for all; the next takes its place when it is not."""
        said = mine.contiguous().view(-1).view(torch.uint8)
        self._found, self._meeting = self._lead_or_follow(mine, said, combine, kind), self._meeting + 1
        return self._found.view(mine.dtype)

    def _lead_or_follow(self, mine: Tensor, said: Tensor, combine: Combine, kind: str | None) -> Tensor:
        """What a meeting finds, as bytes.

        A worker without a way to a first rank that lives would wait for one who follows that, so its waiting ends.
        """
        for leader in range(self.rank):
            longest_s = math.inf if leader == 0 else self._last_resort_s
            with suppress(PeerError):
                told = self._say(leader, (_MEETS, self._meeting), said, None, longest_s)
                self._count(kind, QUESTION_HEAD_BYTES + said.nbytes, _LENGTH.size + told.nbytes)
                return told
        heard = {self.rank: mine}
        for peer in range(self.rank + 1, self.num_workers):
            if (laid := self._lay(peer)) is not None:
                heard[peer] = laid.view(mine.dtype).view(mine.shape)
        told = combine([heard[rank] for rank in sorted(heard)]).contiguous().view(-1).view(torch.uint8)
        for peer in sorted(heard.keys() - {self.rank}):
            self._tell(peer, told)
            self._count(kind, _LENGTH.size + told.nbytes, QUESTION_HEAD_BYTES + said.nbytes)
        return told

    def _lay(self, peer: int) -> Tensor | None:
        """What a peer brings to this meeting, once it was told of the last, whose leader may be dead; None if gone."""
        while laid := self._laid[peer].get():
            number, message = laid
            if number == self._meeting:
                return message
            self._tell(peer, self._found)
        self._laid[peer].put(None)  # it will not come to the next meeting either
        return None

    def _tell(self, peer: int, found: Tensor) -> None:
        with suppress(OSError):  # whoever has died since will be missed at the next meeting
            self._of[peer].sendall(_LENGTH.pack(found.nbytes), _MORE)
            self._of[peer].sendall(_bytes(found))

    def close(self) -> None:
        """Hang up; threads that wait for a peer find that out."""
        lines = (*self._to.values(), *self._of.values())
        for line in lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:  # one that outlives the interpreter by a moment would abort the process
            thread.join(_GOODBYE_S)
        for line in lines:
            line.close()

    def _say(
        self, peer: int, purpose: tuple[int, int], said: Tensor, num_back: int | None, longest_s: float = math.inf
    ) -> Tensor:
        """What `peer` answers, which tells its own length if `num_back` is None; PeerError if it is gone."""
        if peer in self._lost:
            raise PeerError(f"rank {peer} was lost before")
        line = self._to[peer]
        try:
            with self._talking[peer]:
                line.sendall(_HEAD.pack(_MAGIC, *purpose, said.nbytes, num_back or 0), _MORE)
                line.sendall(_bytes(said))
                line.settimeout(None if math.isinf(longest_s) else longest_s)
                if num_back is None:
                    (num_back,) = _LENGTH.unpack(_bytes(_receive(line, _LENGTH.size)))
                    line.settimeout(None)
                return _receive(line, num_back)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # ours, not that of a host that is silent
                raise LaunchError(
                    f"rank {self.rank} waited {longest_s:.0f} s to meet rank {peer} and has lost rank "
                    f"{', '.join(map(str, sorted(self._lost)))}; mend its links and resume from a checkpoint"
                ) from None
            self._lost.add(peer)
            raise PeerError(f"rank {peer} is gone ({error.strerror or error})") from None

    def _count(self, kind: str | None, bytes_out: int, bytes_in: int) -> None:
        if kind is not None:
            with self._counting:
                self.traffic.count(kind, bytes_out, bytes_out, bytes_in)


def open_mailbox(transport: Collectives, patience_s: float) -> TcpMailbox:
    """A mailbox among the workers of a transport; a call that all of them make."""
    rank, token = transport.rank, secrets.token_hex(16)
    with open_door(transport.num_workers) as door:
        cards = _all_cards(transport, [*door.getsockname()[:2], token])
        to = {peer: _call(rank, peer, *card) for peer, card in enumerate(cards) if peer != rank}
        of: dict[int, socket.socket] = {}
        door.settimeout(_JOIN_TIMEOUT_S)
        while len(of) < len(to):
            try:
                line, _ = door.accept()
            except TimeoutError:
                late = min(to.keys() - of.keys())
                raise LaunchError(f"rank {late} has not called rank {rank} for {_JOIN_TIMEOUT_S:.0f} s") from None
            peer = _greeted_by(line, token)
            if peer in to and peer not in of:
                of[peer] = line
            else:
                line.close()  # a stranger
    return TcpMailbox(rank, to, of, patience_s)


def _all_cards(transport: Collectives, mine: list[str | int]) -> list[list[Any]]:
    """Where each worker is, and the token that shows that one was told."""
    card = torch.frombuffer(bytearray(json.dumps(mine).encode().ljust(_CARD_BYTES)), dtype=torch.uint8)
    everyone = transport.all_gather(card.to(transport.wire or "cpu"), "addresses").cpu()
    return [json.loads(bytes(row.tolist())) for row in everyone]


def _call(rank: int, peer: int, host: str, port: int, token: str) -> socket.socket:
    try:
        line = socket.create_connection((host, port), _JOIN_TIMEOUT_S)
        tuned(line, None).sendall(_HELLO.pack(token.encode(), rank))
    except OSError as error:
        raise LaunchError(
            f"rank {rank} cannot reach rank {peer} at {host}:{port} ({error.strerror or error}); {WHICH_WAY}"
        ) from None
    return line


def _greeted_by(line: socket.socket, token: str) -> int | None:
    """The rank of who calls; None if it was not told the token."""
    try:
        said, peer = _HELLO.unpack(_bytes(_receive(tuned(line, _HELLO_TIMEOUT_S), _HELLO.size)))
    except OSError:
        return None
    line.settimeout(None)
    return int(peer) if secrets.compare_digest(said, token.encode()) else None


def _bytes(message: Tensor) -> memoryview:
    return message.numpy().data


def _receive(line: socket.socket, num_bytes: int) -> Tensor:
    """So many bytes; OSError if the other end is gone."""
    message = torch.empty(num_bytes, dtype=torch.uint8)
    fill_(line, _bytes(message))
    return message


def _give_up_after(line: socket.socket, silence_s: float) -> None:
    """Take a host that says nothing, not even that it lives, for dead; one that dies in order says so at once."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(min(1e3 * silence_s, 2**31 - 1)))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_S)
