"""The process that members dial: an open door, a line to each member, and a state that outlives it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from laconic.errors import FrameError, LaconicError, PeerError, SchemeError, StateError
from laconic.members.messages import (
    Join,
    Leave,
    Line,
    Offer,
    Refusal,
    Report,
    Word,
)
from laconic.members.replica import check_elastic
from laconic.members.syncer import Syncer
from laconic.members.tape import Event, Tape
from laconic.recipes import parse
from laconic.scheme import OuterScheme
from laconic.transport import Acceptor, Connection

_LOG = logging.getLogger("laconic.members")
_TICK_S = 0.05  # between two looks whether a round has waited long enough
_JOIN_BYTES = 1 << 24  # of the layout of a model
_BACKLOG = 256  # callers that may wait, or be in a handshake
_REFUSALS_S = 10.0  # between two lines about callers that failed the handshake
_GOODBYE_S = 5.0


class MemberServer:
    """A server that members join at one address, and leave when they like.

    Args:
        scheme: A text like "streaming:every=64", or an OuterScheme.
        listen: Where members dial, as "host:port"; port 0 takes a free one.
        quorum: Drifts without which no round is closed.
        wait_budget_s: The longest that a round waits for members that it has called.
        is_lockstep: Whether every round waits for all members that are there, so that a run repeats bit for bit.
        combine: What is made of a round's drifts: "mean", or for members who may lie "clipped", "median", "trimmed".
        mask_bits: 8 or 16: members send codes of so many bits under masks, and the server sees their sum alone.
        state: A folder that keeps the run; a server that finds one there continues it.
        tape: A file that records all that members send; `laconic.members.replay` repeats the run from it.

    Raises:
        SchemeError: The scheme has no outer steps that a server takes, there is no such rule, or masks would hide
            what one of them reads.
        StateError: The folder holds another run's state, or a part of one; the tape did not see the run begin.

    Example:
        >>> with MemberServer("streaming:every=64", "127.0.0.1:0") as server:
        ...     member = laconic.join(server.address, model, optimizer)
        ...     member.leave()
    """

    def __init__(
        self,
        scheme: OuterScheme | str,
        listen: str = "127.0.0.1:7700",
        *,
        quorum: int = 1,
        wait_budget_s: float = 10.0,
        is_lockstep: bool = False,
        combine: str = "mean",
        mask_bits: int = 0,
        state: str | Path | None = None,
        tape: str | Path | None = None,
    ) -> None:
        outer_scheme = check_elastic(parse(scheme) if isinstance(scheme, str) else scheme)
        if quorum < 1:
            raise SchemeError(f"quorum is {quorum}; give 1 or more")
        if not wait_budget_s >= 0:
            raise SchemeError(f"wait_budget_s is {wait_budget_s}; give 0 or more seconds")
        self._folder = None if state is None else Path(state)
        options: dict[str, Any] = {
            "quorum": quorum,
            "wait_budget_s": wait_budget_s,
            "is_lockstep": is_lockstep,
            "combine": combine,
            "mask_bits": mask_bits,
        }
        self.syncer = Syncer(outer_scheme, save=self._save, **options)
        self._tape: Tape | None = None
        self._opened = ExitStack()  # the folder's lock, the port and the tape
        try:
            states = {}
            if self._folder is not None:
                self._opened.enter_context(locked(self._folder))
                states = read_states(self._folder)
            if states:
                self.syncer.load(states)
                _LOG.info("the run in %s continues at round %d", self._folder, self.syncer.rounds)
            self._acceptor = Acceptor(_BACKLOG, address_of(listen))
            self._opened.callback(self._acceptor.close)
            if tape is not None:
                self._tape = Tape(Path(tape), str(outer_scheme), options, continues=bool(states))
                self._opened.callback(self._tape.close)
        except BaseException:
            self._opened.close()
            raise
        self._lock = threading.Lock()  # of the syncer and the lines
        self._lines: dict[int, Line] = {}
        self._num_lines = self._num_refused = 0
        self._refusals_due = 0.0
        self._handshakes = threading.BoundedSemaphore(_BACKLOG)
        self.error: LaconicError | None = None  # what ended the run
        self._ended = threading.Event()
        self.bytes_out = self.bytes_in = 0  # of lines that have ended
        host, port, *_ = self._acceptor.address
        self.address = f"{host}:{port}"  # where members dial
        self._is_open = True
        self._threads = [
            threading.Thread(target=work, name=f"laconic-members-{work.__name__.strip('_')}", daemon=True)
            for work in (self._accept, self._tick)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> MemberServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Wait until the run ends; an error where that is not by `close()`, as where its state cannot be written."""
        self._ended.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End all connections; the state stays."""
        self._is_open = False
        self._ended.set()
        self._acceptor.close()
        for line in list(self._lines.values()):
            line.close()
        for thread in self._threads:
            thread.join(_GOODBYE_S)
        with self._lock:
            self._opened.close()

    def stats(self) -> dict[str, Any]:
        """The run's clock, its members and its traffic, as plain numbers and texts."""
        now = time.monotonic()
        with self._lock:
            syncer = self.syncer
            lines = list(self._lines.values())
            members = [
                {
                    **member.report,
                    "id": member.id,
                    "address": member.address,
                    "is_there": member.connection is not None,
                    "tokens": member.tokens,
                    "steps": member.steps,
                    "rounds": member.rounds,
                    "late": member.num_late,
                    "residual_norm": None if syncer.mask_bits else member.residual_norm,
                    "share": member.share,
                    "clipped_norm": member.clipped_norm,
                    "seen_s_ago": now - member.seen_at,
                }
                for member in syncer.members.values()
            ]
            return {
                "scheme": str(syncer.scheme),
                "combine": str(syncer.combine),
                "mask_bits": syncer.mask_bits,
                "run": syncer.run,
                "tokens": syncer.tokens,
                "rounds": syncer.rounds,
                "versions": {number: fragment.version for number, fragment in syncer.fragments.items()},
                "num_members": syncer.num_members,
                "wait_budget_s": syncer.wait_budget_s,
                "bytes_out": self.bytes_out + sum(line.bytes_out for line in lines),
                "bytes_in": self.bytes_in + sum(line.bytes_in for line in lines),
                "lost_norm": syncer.lost_norm,
                "members": members,
            }

    # Threads

    def _accept(self) -> None:
        while self._is_open:
            try:
                connection, address = self._acceptor.accept_next()
            except OSError:
                continue
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._open_line, args=(connection, address), daemon=True).start()
            else:
                connection.close()

    def _open_line(self, connection: Connection, address: str) -> None:
        """A caller that knows the key gets a line, on which it is told what runs here."""
        try:
            self._acceptor.shake_hands(connection)
        except (OSError, FrameError, ValueError) as error:
            connection.close()
            self._note_refused(address, error)
            return
        finally:
            self._handshakes.release()
        with self._lock:
            self._num_lines += 1
            number = self._num_lines
            line = Line(
                connection,
                lambda word: self._on_word(number, address, word),
                lambda why: self._on_end(number, why),
                _JOIN_BYTES,
            )
            self._lines[number] = line
        line.start()
        line.send(Offer(str(self.syncer.scheme), self.syncer.mask_bits))

    def _note_refused(self, address: str, error: Exception) -> None:
        """Log callers that failed the handshake, one line for many: who guesses at secrets fills no disk."""
        self._num_refused += 1
        now = time.monotonic()
        if now >= self._refusals_due:
            self._refusals_due = now + _REFUSALS_S
            text = "%d callers failed the handshake, the last one from %s (%s)"
            _LOG.warning(text, self._num_refused, address, type(error).__name__)

    def _tick(self) -> None:
        while self._is_open:
            time.sleep(_TICK_S)
            self._play(0)

    def _on_word(self, number: int, address: str, word: Word) -> None:
        """Do what a member asks for; one that sends nonsense is told so, and its line ends."""
        if isinstance(word, Report):
            self._lines[number].send(Report(json.dumps(self.stats())))
            return
        if isinstance(word, Leave) and (id := self.syncer.ids.get(number)) is not None:
            _LOG.info("member %r leaves", id)
        try:
            self._play(number, word, address)
        except FrameError as error:
            _LOG.warning("a member at %s is refused: %s", address, error)
            self._lines[number].send(Refusal(str(error)))
            self._lines[number].finish()
            return
        if isinstance(word, Join) and number in self.syncer.ids:
            sizes = [4 * layout.num_entries for layout in self.syncer.layouts.values()]
            self._lines[number].longest = max(sizes) + _JOIN_BYTES
            self._lines[number].most_unsent = 2 * sum(sizes) + _JOIN_BYTES  # the model, and updates meanwhile
            _LOG.info("member %r joined from %s", word.id, address)

    def _on_end(self, number: int, why: str) -> None:
        with self._lock:
            line = self._lines.pop(number)
            self.bytes_out += line.bytes_out
            self.bytes_in += line.bytes_in
            id = self.syncer.ids.get(number)
        threading.Thread(target=line.close, daemon=True).start()  # which waits for the thread that calls this
        if id is not None:
            _LOG.info("member %r is gone: %s", id, why)
            self._play(number)

    def _play(self, number: int, word: Word | None = None, address: str = "") -> None:
        """Send what the syncer answers; where its state cannot be written, nobody is told, and the run ends here."""
        with self._lock:
            event = Event(time.monotonic(), number, word, address)
            is_idle = not number and not self.syncer.has_drifts  # time alone closes nothing else
            if is_idle or self.error is not None or not self._is_open:
                return
            try:
                if self._tape is not None:
                    self._tape.write(event)
                for connection, answer in event.play(self.syncer):
                    if connection in self._lines and answer is None:
                        self._lines[connection].cut()
                    elif connection in self._lines and answer is not None:
                        self._lines[connection].send(answer)
            except FrameError:
                raise
            except StateError as error:  # members train on, and find the server that continues from what was written
                self.error = error
            except Exception as error:  # a server that goes on in an unknown state would hold all members up
                _LOG.exception("the run ends")
                sender = self.syncer.ids.get(number)
                event_name = "a round" if sender is None else f"a message of member {sender!r}"
                self.error = PeerError(
                    f"{event_name} ended in {type(error).__name__}, a defect of laconic; serve it again"
                )
            if self.error is not None:
                self._ended.set()

    def _save(self, number: int, state: dict[str, Any]) -> None:
        if self._folder is not None:
            try:
                write_state(self._folder, number, state)
            except OSError as error:
                raise StateError(
                    f"cannot write the run to {self._folder} ({error.strerror}); free some space, and serve it again"
                ) from None


def address_of(text: str) -> tuple[str, int]:
    """Host and port of "host:port"; SchemeError where it is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise SchemeError(f"{text!r} is no address; write it as host:port, like 0.0.0.0:7700, with a port up to 65535")
    return host.strip("[]"), int(port)


def locked(folder: Path) -> IO[bytes]:
    """The open lock of a folder, which is made where it is missing; StateError where another server has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StateError(f"{folder} is in use by another server; end that one, or give another folder") from None
    except OSError as error:
        raise StateError(
            f"cannot keep a run in {folder} ({error.strerror}); give a folder that can be written"
        ) from None
    return lock


def write_state(folder: Path, number: int, state: dict[str, Any]) -> None:
    """Replace a fragment's file, so that it is whole whenever the machine stops."""
    arrays = {name: value.cpu().numpy() for name, value in state.items() if isinstance(value, Tensor)}
    named = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    path = folder / f"fragment-{number}.npz"
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        arrays["named"] = np.frombuffer(json.dumps(named).encode(), np.uint8)
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder_number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_number)
    finally:
        os.close(folder_number)


def read_states(folder: Path) -> dict[int, dict[str, Any]]:
    """The states of all fragments in a folder, by number."""
    states = {}
    for path in sorted(folder.glob("fragment-*.npz")):
        try:
            with np.load(path, allow_pickle=False) as file:
                named = json.loads(file["named"].tobytes())
                tensors = {name: torch.from_numpy(file[name]) for name in file.files if name != "named"}
            states[int(path.stem.removeprefix("fragment-"))] = {**named, **tensors}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise StateError(
                f"{path} is no state of a fragment ({type(error).__name__}); restore it, or begin in an empty folder"
            ) from None
    return states
