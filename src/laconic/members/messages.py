"""What members and their server send each other, and how it is written: a few named fields, then bytes."""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.transport import Kind, Message, payload_of

_LENGTH = struct.Struct("<I")  # of the fields that follow it
_ALIGNED = 16  # bytes: a vector that follows may be viewed in place
_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "dict[str, Any]": dict,
}
PROTOCOL = 1
NOTHING = payload_of(b"")
FORGOTTEN = -2


@dataclass(frozen=True)
class Offer:
    """The first word of a server: what it runs."""

    scheme: str
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Join:
    """A member's answer: who it is, and what it trains."""

    id: str
    generation: int  # drawn anew by each process: who comes back with the same one has its residual still
    fingerprint: str
    inner_momentum: float  # of the optimizer that trains it
    layouts: dict[str, Any]  # fragment -> [[name, shape], ...]


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


@dataclass(frozen=True)
class Anchor:
    """A fragment as it is in one version, and what became of the receiver's last drift of it."""

    fragment: int
    version: int
    counted: int  # the number of the receiver's drift that was counted last; -1: none, FORGOTTEN: nobody knows
    is_held: bool  # whether the round that is open has one
    check: int
    payload: Tensor = field(compare=False)  # nothing where the receiver has this version

    @classmethod
    def of(
        cls, fragment: int, version: int, values: Tensor | None, counted: int = -1, *, is_held: bool = False
    ) -> Anchor:
        """One with a copy of these values."""
        payload = NOTHING if values is None else values.to("cpu", copy=True).view(torch.uint8)
        return cls(fragment, version, counted, is_held, zlib.crc32(payload.numpy().data), payload)

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


Word: TypeAlias = Offer | Join | Status | Request | Anchor | Drift | Update | Call | Leave | Bequest | Report | Refusal


class Outgoing(NamedTuple):
    """A message and the connection that it leaves by."""

    connection: int
    word: Word


_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (Offer, Join, Status, Request, Anchor, Drift, Update, Call, Leave, Bequest, Report, Refusal)
}


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
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise FrameError(f"sent something that is no message of a member ({type(error).__name__})") from None
    wanted = {each.name: str(each.type) for each in fields(cls) if each.name != "payload"}
    if not isinstance(named, dict) or named.keys() != wanted.keys():
        raise FrameError(f"sent {name} with other fields; run the same release of laconic everywhere")
    for field_name, value in named.items():
        if not isinstance(value, _TYPES[wanted[field_name]]) or (isinstance(value, float) and not math.isfinite(value)):
            raise FrameError(f"sent {name} with {field_name}={value!r}")
    has_payload = any(each.name == "payload" for each in fields(cls))
    word: Word = cls(**named, **({"payload": payload[stop:]} if has_payload else {}))
    return word
