"""What is no message of a member is refused in one line, whoever sent it."""

from __future__ import annotations

import json
import struct

import pytest

from laconic.errors import FrameError
from laconic.members.messages import read
from laconic.transport import Kind, Message, payload_of

DRIFT = {"fragment": 0, "version": 3, "number": 9, "tokens": 512, "steps": 8, "residual_norm": 0.5, "report": {}}


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
        read(Message(Kind.MEMBER, payload=payload_of(struct.pack("<I", len(text)) + text.encode())))


def test_a_drift_is_read() -> None:
    text = json.dumps(["Drift", DRIFT])
    word = read(Message(Kind.MEMBER, payload=payload_of(struct.pack("<I", len(text)) + text.encode())))
    assert {name: value for name, value in vars(word).items() if name != "payload"} == DRIFT
