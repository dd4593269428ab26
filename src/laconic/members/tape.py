"""A tape records what a server received and when: an elastic run can be replayed from it, bit for bit."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from laconic.errors import FrameError, StateError
from laconic.members.messages import Outgoing, Word, read, write
from laconic.members.replica import check_elastic
from laconic.members.syncer import Syncer
from laconic.recipes import parse
from laconic.transport import Kind, Message, payload_of

_HEAD = struct.Struct("<dII")  # the time, a connection (0: none), and the bytes of a message that follow


class Event(NamedTuple):
    """A message of a connection; without one the connection has ended; without a connection, time has passed."""

    now: float
    connection: int = 0
    word: Word | None = None
    address: str = ""

    def play(self, syncer: Syncer) -> list[Outgoing]:
        """Let a server know."""
        if not self.connection:
            return syncer.on_time(self.now)
        if self.word is None:
            return syncer.on_lost(self.connection, self.now)
        return syncer.on_word(self.connection, self.word, self.now, self.address)


class Tape:
    """Writes each event before the server acts on it, so that the tape is never behind the state.

    Args:
        path: A file that is continued where it exists, behind its last whole record.
        options: Of the Syncer, beside its scheme.
        continues: Whether the server continues from a state, which the tape must have seen begin.

    Raises:
        StateError: The file cannot be written, or it did not see the run begin.
    """

    def __init__(self, path: Path, scheme: str, options: dict[str, Any], *, continues: bool) -> None:
        if continues and not (path.exists() and path.stat().st_size):
            raise StateError(f"{path} would miss how this run began; give the tape from the beginning, or none")
        if not continues and path.exists() and path.stat().st_size:
            raise StateError(f"{path} is the tape of another run; give another file, or that run's state")
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)  # what was written outlives this process, however it ends
            self._file.truncate(sum(_HEAD.size + len(text) for _, _, text in records(path)))
        except OSError as error:
            raise StateError(f"cannot write {path} ({error.strerror}); give another place") from None
        self._append(0.0, 0, json.dumps([scheme, options]).encode())

    def write(self, event: Event) -> None:
        """Add an event; StateError where there is no space."""
        word = b"" if event.word is None else write(event.word).payload.numpy().tobytes()
        self._append(event.now, event.connection, word)

    def _append(self, now: float, connection: int, text: bytes) -> None:
        record = _HEAD.pack(now, connection, len(text)) + text
        try:
            is_whole = self._file.write(record) == len(record)
        except OSError:
            is_whole = False
        if not is_whole:
            raise StateError(f"cannot write the tape {self._path}; free some space, and serve the run again")

    def close(self) -> None:
        self._file.close()


def replay(path: str | Path) -> Syncer:
    """The server's half of a run, replayed from its tape: anchors, versions, members and clock.

    Raises:
        StateError: The file is no tape.

    Example:
        >>> with laconic.MemberServer("streaming", "127.0.0.1:0", tape="run.tape") as server: ...
        >>> torch.equal(replay("run.tape").fragments[0].anchor, server.syncer.fragments[0].anchor)
        True
    """
    states: dict[int, dict[str, Any]] = {}

    def save(number: int, state: dict[str, Any]) -> None:
        states[number] = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    syncer: Syncer | None = None
    for now, connection, text in records(Path(path)):
        if not connection and text:
            scheme, options = json.loads(text)
            syncer = Syncer(check_elastic(parse(scheme)), save=save, **options)
            if states:
                syncer.load(states)
            continue
        if syncer is None:
            break
        word = read(Message(Kind.MEMBER, payload=payload_of(text))) if text else None
        try:
            Event(now, connection, word).play(syncer)
        except FrameError:  # as it was refused then
            continue
    if syncer is None:
        raise StateError(f"{path} is no tape; give one that `laconic serve --tape` wrote")
    return syncer


def records(path: Path) -> Iterator[tuple[float, int, bytes]]:
    """(time, connection, bytes of a message) of every whole record; connection 0 beside bytes is the server itself."""
    try:
        opened = path.open("rb")
    except OSError as error:
        raise StateError(f"cannot read {path} ({error.strerror}); give a tape of `laconic serve --tape`") from None
    with opened as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            now, connection, length = _HEAD.unpack(head)
            text = file.read(length)
            if len(text) == length:
                yield now, connection, text
