"""What members and their server send each other, how it is written (a few named fields, then bytes), and the line."""

from __future__ import annotations

import hashlib
import json
import math
import queue
import struct
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.fault_points import fault_point
from laconic.transport import Connection, Kind, Message, payload_of

_GOODBYE_S = 5.0
_SILENCE_S = 30.0  # after which the kernel takes a host for dead that answers no probe
_LENGTH = struct.Struct("<I")  # of the fields that follow it
_ALIGNED = 16  # bytes: a vector that follows may be viewed in place
_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "dict[str, Any]": dict,
}
_MOST = 1 << 63  # of a count, so that a tensor or a float holds it
MOST_TOKENS = 1 << 40  # of a drift: sums of 8 million such are counts that a message may hold
PROTOCOL = 2
NOTHING = payload_of(b"")
FORGOTTEN = -2


@dataclass(frozen=True)
class Offer:
    """The first word of a server: what it runs."""

    scheme: str
    mask_bits: int = 0  # of a masked code; 0: drifts go in clear
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Join:
    """A member's answer: who it is, and what it trains."""

    id: str
    generation: int  # drawn anew by each process: who comes back with the same one has its residual still
    fingerprint: str
    inner_momentum: float  # of the optimizer that trains it
    layouts: dict[str, Any]  # fragment -> [[name, shape], ...]
    key: str = ""  # under masks: its public key


@dataclass(frozen=True)
class Status:
    """Where the run stands."""

    run: str  # drawn where a run begins, and kept with its state
    founder: int  # the generation of the member whose model is the first anchor
    is_founded: bool  # whether all of that has come
    tokens: int
    rounds: int
    num_members: int
    is_lockstep: bool
    lost_norm: float = 0.0  # of the residual that ended with a process which had the receiver's id before


@dataclass(frozen=True)
class Request:
    """A member wants the updates of a fragment, whose anchor it has in this version, or in none (-1)."""

    fragment: int
    version: int
    pending: int  # the number of its drift of which it does not know whether it was counted; -1: it has none
    question: int = 0  # the answer repeats it


@dataclass(frozen=True)
class Anchor:
    """A fragment as it is in one version, and what became of the receiver's last drift of it."""

    fragment: int
    version: int
    counted: int  # the number of the receiver's drift that was counted last; -1: none, FORGOTTEN: nobody knows
    is_held: bool  # whether the round that is open has one
    question: int  # to which this is the answer
    check: int
    payload: Tensor = field(compare=False)  # nothing where the receiver has this version

    @classmethod
    def of(
        cls,
        fragment: int,
        version: int,
        values: Tensor | None,
        counted: int = -1,
        question: int = 0,
        *,
        is_held: bool = False,
    ) -> Anchor:
        """One with a copy of these values."""
        payload = NOTHING if values is None else values.to("cpu", copy=True).view(torch.uint8)
        return cls(fragment, version, counted, is_held, question, zlib.crc32(payload.numpy().data), payload)

    def values(self) -> Tensor:
        """The float32 entries; FrameError where they are not what was sent."""
        if zlib.crc32(self.payload.numpy().data) != self.check or self.payload.numel() % 4:
            raise FrameError(f"sent an anchor of fragment {self.fragment} whose check sum does not match")
        return self.payload.view(torch.float32)


@dataclass(frozen=True)
class Drift:
    """How far a member has come from an anchor, and what it kept back."""

    fragment: int
    version: int  # of the anchor
    number: int  # drawn for each drift, so that a restored member knows whether it was this one that was counted
    tokens: int  # it was made of, which are its weight in the mean
    steps: int
    residual_norm: float
    report: dict[str, Any]  # what the member says of itself, like its loss
    payload: Tensor = field(compare=False)  # nothing under masks, until a roster has come


@dataclass(frozen=True)
class Keys:
    """Under masks: who has come, with its public key, or is gone, with none."""

    keys: dict[str, Any]  # by process
    is_all: bool  # whether nobody else is there


@dataclass(frozen=True)
class Roster:
    """Under masks: whose drifts the server is going to add up, and on what grid."""

    fragment: int
    version: int
    attempt: int  # of this version: words for one before it are of no use
    tokens: int  # of all of them
    numbers: dict[str, Any]  # process -> the number of its drift
    payload: Tensor = field(compare=False)  # the exponents of the grid's steps

    def digest(self) -> bytes:
        """What no other sum has, and all that the words for this one depend on beside drifts and keys."""
        text = json.dumps([self.fragment, self.version, self.attempt, self.tokens, self.numbers])
        return hashlib.sha256(text.encode() + self.payload.numpy().tobytes()).digest()


@dataclass(frozen=True)
class Codes:
    """A drift on a roster's grid, under masks that cancel in the sum."""

    fragment: int
    roster: str  # its digest
    payload: Tensor = field(compare=False)


@dataclass(frozen=True)
class Update:
    """What moves the anchors of all members to the next version."""

    fragment: int
    version: int  # that it leads to
    is_counted: bool  # whether the receiver's drift is in it
    tokens: int
    rounds: int
    num_members: int
    payload: Tensor = field(compare=False)


@dataclass(frozen=True)
class Call:
    """A round waits: the receiver is to send what it has."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Leave:
    """The last word of a member, and the server's answer that all before it has come."""


@dataclass(frozen=True)
class Bequest:
    """What a member that leaves has drifted and kept, whole; it goes into the next mean."""

    fragment: int
    tokens: int
    payload: Tensor = field(compare=False)


@dataclass(frozen=True)
class Report:
    """The question how the run goes, of who need not be a member, and the answer: the server's `stats()` as JSON."""

    text: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why the server does not go on with the receiver."""

    why: str


Word: TypeAlias = (
    Offer
    | Join
    | Status
    | Request
    | Anchor
    | Drift
    | Keys
    | Roster
    | Codes
    | Update
    | Call
    | Leave
    | Bequest
    | Report
    | Refusal
)


class Outgoing(NamedTuple):
    """A message and the connection that it leaves by."""

    connection: int
    word: Word | None  # None: the connection ends


_CLASSES: dict[str, Any] = {each.__name__: each for each in get_args(Word)}


def write(word: Word) -> Message:
    """The message that a connection sends."""
    named = {each.name: getattr(word, each.name) for each in fields(word) if each.name != "payload"}
    text = json.dumps([type(word).__name__, named]).encode()
    text = text.ljust(-(-(len(text) + _LENGTH.size) // _ALIGNED) * _ALIGNED - _LENGTH.size)
    head = payload_of(_LENGTH.pack(len(text)) + text)
    body = getattr(word, "payload", NOTHING)
    return Message(Kind.MEMBER, payload=torch.cat([head, body]) if body.numel() else head)


def read(message: Message) -> Word:
    """What a connection received; FrameError where that is no message of ours."""
    payload = message.payload.view(torch.uint8)
    try:
        (length,) = _LENGTH.unpack(payload[: _LENGTH.size].numpy().tobytes())
        stop = _LENGTH.size + length
        name, named = json.loads(payload[_LENGTH.size : stop].numpy().tobytes())
        cls = _CLASSES[name]
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"sent something that is no message of a member ({type(error).__name__})") from None
    if stop % _ALIGNED or stop > payload.numel():
        raise FrameError(f"sent {name} whose fields end at byte {stop} of {payload.numel()}")
    wanted = {each.name: str(each.type) for each in fields(cls) if each.name != "payload"}
    if not isinstance(named, dict) or named.keys() != wanted.keys():
        raise FrameError(f"sent {name} with other fields; run the same release of laconic everywhere")
    for field_name, value in named.items():
        is_bounded = (
            math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or abs(value) < _MOST
        )
        if not isinstance(value, _TYPES[wanted[field_name]]) or not is_bounded:
            raise FrameError(f"sent {name} with {field_name}={str(value)[:40]}")
    has_payload = any(each.name == "payload" for each in fields(cls))
    word: Word = cls(**named, **({"payload": payload[stop:]} if has_payload else {}))
    return word


class Line:
    """A connection whose ends send when they like.

    Args:
        connection: One whose handshake is over.
        on_word: Called with each message, in a thread of the line's own.
        on_end: Called once with the reason, when the connection has ended.
        longest: Bytes that a message may have at most; set `longest` and `most_unsent` anew once more is known.
    """

    def __init__(
        self, connection: Connection, on_word: Callable[[Word], None], on_end: Callable[[str], None], longest: int
    ) -> None:
        self.bytes_out = self.bytes_in = 0
        self._connection = connection
        self._on_word = on_word
        self._on_end = on_end
        self.longest = longest
        self.most_unsent = 4 * longest  # bytes that may wait for an end that takes little
        self._waiting: queue.SimpleQueue[Word | None] = queue.SimpleQueue()
        self._unsent = 0
        self._counting = threading.Lock()
        connection.give_up_after(_SILENCE_S)
        self._threads = [
            threading.Thread(target=work, name=f"laconic-{work.__name__.strip('_')}", daemon=True)
            for work in (self._read, self._write)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, word: Word) -> None:
        """Let a message leave after those before it; the line ends where its other end takes too little."""
        fault_point("members.send", word)
        with self._counting:
            self._unsent += _size(word)
        if self._unsent > self.most_unsent:
            self._connection.shut_down()
        self._waiting.put(word)

    def _read(self) -> None:
        why = "of an error on this side"
        try:
            while True:
                message = self._connection.receive({Kind.MEMBER: self.longest})
                self.bytes_in += message.num_bytes
                word = read(message)
                fault_point("members.receive", word)
                self._on_word(word)
        except OSError as error:
            why = str(error.strerror or error)
        except FrameError as error:
            why = f"it {error}"
        finally:  # who is gone is not waited for, whatever ended its line
            self._connection.shut_down()
            self._waiting.put(None)
            self._on_end(why)

    def _write(self) -> None:
        with suppress(OSError):  # the thread that reads finds that out
            while (word := self._waiting.get()) is not None:
                self.bytes_out += self._connection.send(write(word))
                with self._counting:
                    self._unsent -= _size(word)
        self._connection.shut_down()

    def cut(self) -> None:
        """End it now, from any thread; nothing that its other end sends from here on is read."""
        self._connection.shut_down()

    def finish(self) -> None:
        """End it once all that waits has left."""
        self._waiting.put(None)

    def close(self) -> None:
        """End it now; its threads find that out."""
        self._connection.shut_down()
        self._waiting.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(_GOODBYE_S)
        self._connection.close()


def _size(word: Word) -> int:
    payload = getattr(word, "payload", None)
    return 0 if payload is None else int(payload.numel())
