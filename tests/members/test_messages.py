"""What is no message of a member is refused in one line, whoever sent it."""

from __future__ import annotations

import json
import struct

import pytest

from laconic.errors import FrameError
from laconic.members.messages import read
from laconic.transport import Kind, Message, payload_of

DRIFT = {"fragment": 0, "version": 3, "number": 9, "tokens": 512, "steps": 8, "residual_norm": 0.5, "report": {}}


def _read(text: str) -> object:
    """As it was sent: a text whose length keeps what follows aligned."""
    text = text.ljust(-(-(len(text) + 4) // 16) * 16 - 4)
    return read(Message(Kind.MEMBER, payload=payload_of(struct.pack("<I", len(text)) + text.encode())))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,  # deeper than a reader of JSON goes
        json.dumps(["Drift", {**DRIFT, "tokens": 10**400}]),  # more than a float or a tensor holds
        json.dumps(["Drift", {**DRIFT, "version": -(1 << 64)}]),
        json.dumps(["Drift", {**DRIFT, "residual_norm": float("inf")}]),
        json.dumps(["Drift", {**DRIFT, "tokens": "many"}]),
        json.dumps(["Drift", {"tokens": 1}]),
        json.dumps(["Wish", DRIFT]),
        "5",
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(FrameError, match=r"^sent "):
        _read(text)


@pytest.mark.parametrize("length", [-1, 1, 16])
def test_fields_that_end_amid_what_follows_are_refused(length: int) -> None:
    """A vector behind them could not be viewed, which would end the round that has it, and every later one."""
    text = json.dumps(["Drift", DRIFT])
    text = text.ljust(-(-(len(text) + 4) // 16) * 16 - 4)
    raw = struct.pack("<I", len(text) + length) + text.encode() + b" "
    with pytest.raises(FrameError, match="whose fields end at byte"):
        read(Message(Kind.MEMBER, payload=payload_of(raw)))


def test_a_drift_is_read() -> None:
    word = _read(json.dumps(["Drift", DRIFT]))
    assert {name: value for name, value in vars(word).items() if name != "payload"} == DRIFT
