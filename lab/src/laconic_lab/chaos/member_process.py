"""A member of an elastic run, or its server, as a process that meets its fault at the phase that was drawn.

Imported once by the process that these are forked from, like `victim`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch._dynamo  # an optimizer imports it when it is first made
from torch import nn

import laconic
from laconic.cli import main
from laconic.testing import at_fault_point
from laconic_lab.chaos.schedule import Case
from laconic_lab.network import enter
from laconic_lab.tasks import TASKS

SERVER = 0  # the rank of the server; members have the ranks behind it
WAIT_BUDGET_S = 0.8
TOKENS = 64_000  # in drifts that were counted, at which a run ends: 500 steps of each of four members
_BATCH, _LR = 32, 5e-4
_PACE_S = 0.015  # that a member pauses at a step, so that four and what strikes them share two cores
_NOTE_EVERY = 10  # steps
_TIMEOUT_S = 60.0
_PAUSE_S = 0.2  # before a member is started again that found no server
_QUIET_S = 0.005
_MID_RUN = 0.4  # of the tokens, at which the member of the phase `leave` does so

torch.set_num_threads(1)
_DATA = TASKS["fashion-mnist"].load(None, None)
_lasting = ExitStack()  # what is set until the process ends


@dataclass(frozen=True)
class Station:
    """Where a process runs, and what it leaves there."""

    rank: int
    life: int  # how many processes had this rank before
    address: str  # of the server
    home: Path  # the folder of the run
    namespace: str = ""  # of a host of a lab

    def enter(self) -> None:
        """Be on that host; what this process prints goes to a file."""
        if self.namespace:
            enter.join(self.namespace)
        os.dup2(os.open(self.file("err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)

    def file(self, kind: str) -> Path:
        return self.home / f"{kind}-{self.rank}-{self.life}"


class _Fault:
    """Befalls this process once, at its phase: it is killed, or stopped until the supervisor has done the rest."""

    def __init__(self, case: Case, home: Path) -> None:
        self._case = case
        self._struck = home / "struck"
        self._counts: Counter[str] = Counter()  # of messages, by their names
        self.pending: set[int] = set()  # fragments whose round's result is awaited

    def strike(self) -> None:
        if self._struck.exists():
            return
        self._struck.touch()
        os.kill(os.getpid(), signal.SIGKILL if self._case.fault in ("kill", "restart") else signal.SIGSTOP)

    def _strike_at(self, point: str, word: Any) -> None:
        """Strike where the phase's message comes for the `number`-th time."""
        name = type(word).__name__
        self._counts[f"{point} {name}"] += 1
        if (point, name) == _MESSAGES[self._case.rank == SERVER].get(self._case.phase):
            is_late = self._case.rank != SERVER or self._case.phase != "join" or self._counts["receive Join"] == _LATE
            if is_late and self._counts[f"{point} {name}"] > _least(self._case):
                self.strike()

    def on_send(self, word: Any) -> None:
        if type(word).__name__ == ("Update" if self._case.rank == SERVER else "Drift"):
            (self.pending.discard if self._case.rank == SERVER else self.pending.add)(word.fragment)
        self._strike_at("send", word)

    def on_receive(self, word: Any) -> None:
        if type(word).__name__ == ("Drift" if self._case.rank == SERVER else "Update"):
            (self.pending.add if self._case.rank == SERVER else self.pending.discard)(word.fragment)
        self._strike_at("receive", word)

    def arm(self) -> None:
        for point, handler in (("members.send", self.on_send), ("members.receive", self.on_receive)):
            _lasting.enter_context(at_fault_point(point, handler))

    def watch_server(self) -> None:
        """Strike a server between two rounds, when nothing has been open for a while."""
        while self._counts["send Update"] <= _least(self._case) or self.pending:
            time.sleep(_QUIET_S)
        self.strike()


# The message at which a phase begins, and whether it comes or goes: (of a member, of the server).
_MESSAGES: tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]] = (
    {
        "found": ("send", "Anchor"),
        "join": ("receive", "Anchor"),
        "send": ("send", "Drift"),
        "leave": ("send", "Bequest"),
    },
    {
        "found": ("receive", "Anchor"),
        "join": ("receive", "Request"),
        "send": ("receive", "Drift"),
        "wait": ("send", "Update"),  # of a round that is in the state already, of which nobody knows
        "leave": ("receive", "Bequest"),
    },
)
_LATE = 4  # the join, of which a server's phase `join` is


def _least(case: Case) -> int:
    """Messages that pass before the one at which the fault strikes."""
    if case.phase in ("found", "join", "leave"):  # of which a member sends or receives two
        return case.number % 2 if case.rank != SERVER or case.phase == "found" else 0
    return case.number


def serve(at: Station, scheme: str, case: Case | None) -> None:
    """Do what `laconic serve` does."""
    at.enter()
    if case is not None and case.rank == SERVER and not at.life:
        fault = _Fault(case, at.home)
        fault.arm()
        if case.phase == "training":
            threading.Thread(target=fault.watch_server, daemon=True).start()
    words = ["--scheme", scheme, "--wait-budget", str(WAIT_BUDGET_S), "--state", str(at.home / "run")]
    os._exit(main(["serve", "--listen", f"0.0.0.0:{at.address.rpartition(':')[2]}", *words]))


def network() -> nn.Module:
    """The model that all members train."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.GELU(), nn.Linear(64, 10))


@torch.no_grad()
def observe(at: Station) -> None:
    """Write down the loss of the run's anchor over all examples, also those that nobody trained on."""
    at.enter()
    model = network()
    laconic.join(at.address, model, torch.optim.SGD(model.parameters(), lr=0.1), id="observer").close()
    outputs = model(_DATA.prepare(torch.cat([_DATA.train_inputs, _DATA.test_inputs])))
    targets = torch.cat([_DATA.train_targets, _DATA.test_targets])
    (at.home / "loss").write_text(str(float(nn.functional.cross_entropy(outputs, targets))))
    os._exit(0)


class _Trainee:
    """A member with its examples, and a note of what it saw."""

    def __init__(self, at: Station, case: Case | None, fault: _Fault | None) -> None:
        self._at = at
        self._fault = fault
        self._case = case
        self._draws = torch.Generator().manual_seed(100 * at.rank + at.life)
        self._longest_step_s = self._longest_result_s = 0.0
        self._sent_at: dict[int, float] = {}  # by fragment
        self._anchors: dict[str, int] = {}  # fragment and version -> a digest
        self._is_done = False
        for point, handler in (("members.send", self._on_send), ("members.receive", self._on_receive)):
            _lasting.enter_context(at_fault_point(point, handler))
        self._begin()

    def _begin(self) -> None:
        self._model = network()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_LR)
        state = self._saved() if self._at.life else None
        if state is not None:
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        saved = state and state["member"]
        id = f"m{self._at.rank}"
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                self._member = laconic.join(
                    self._at.address, self._model, self._optimizer, id=id, timeout_s=_TIMEOUT_S, state=saved
                )
                return
            except laconic.LaunchError:  # no server just now: what starts members starts this one again
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    def _on_send(self, word: Any) -> None:
        if type(word).__name__ == "Drift":
            self._sent_at[word.fragment] = time.monotonic()

    def _on_receive(self, word: Any) -> None:
        if type(word).__name__ == "Update" and word.fragment in self._sent_at:
            waited_s = time.monotonic() - self._sent_at.pop(word.fragment)
            self._longest_result_s = max(self._longest_result_s, waited_s)

    def _saved(self) -> dict[str, Any] | None:
        path = self._at.home / f"state-{self._at.rank}"
        if self._case is None or self._case.fault != "restart" or not path.exists():
            return None
        state: dict[str, Any] = torch.load(path)
        return state

    def _save(self) -> None:
        parts: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer, "member": self._member}
        fresh = self._at.file("fresh")
        torch.save({name: part.state_dict() for name, part in parts.items()}, fresh)
        fresh.replace(self._at.home / f"state-{self._at.rank}")

    def train(self) -> None:
        """Train until the run has had its tokens, and leave."""
        leaver = 1 if self._case is None or self._case.rank == SERVER else self._case.rank
        leaves = self._case is not None and self._case.phase == "leave" and self._at.rank == leaver
        leaves = leaves and not self._at.life
        steps = 0
        while (tokens := self._member.progress[0]) < TOKENS:
            self._step(1 - tokens / TOKENS)
            steps += 1
            if steps % _NOTE_EVERY == 0:
                self.note()
                if self._case is not None and self._case.fault == "restart":
                    self._save()
            if leaves and tokens > _MID_RUN * TOKENS:
                leaves = False
                self._member.leave(_TIMEOUT_S)
                self._begin()
            time.sleep(_PACE_S)
        self._member.leave(_TIMEOUT_S)
        self._is_done = True
        self.note()

    def _step(self, share_left: float) -> None:
        rows = torch.randint(len(_DATA.train_targets), (_BATCH,), generator=self._draws)
        outputs = self._model(_DATA.prepare(_DATA.train_inputs[rows]))
        loss = nn.functional.cross_entropy(outputs, _DATA.train_targets[rows])
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.param_groups[0]["lr"] = _LR * share_left
        self._optimizer.step()
        if self._fault is not None and self._case is not None:
            phase = "wait" if self._fault.pending else "training"
            if phase == self._case.phase and self._member.stats().rounds > self._case.number:
                self._fault.strike()
        begun = time.monotonic()
        self._member.step(tokens=_BATCH, loss=loss.item())
        self._longest_step_s = max(self._longest_step_s, time.monotonic() - begun)

    def note(self) -> None:
        """Write down how far it has come."""
        replicas = self._member.state_dict()["replicas"]
        for number, piece in (item for replica in replicas for item in replica["pieces"].items()):
            self._anchors[f"{number}/{piece['version']}"] = crc32(piece["anchor"].numpy().tobytes())
        stats = self._member.stats()
        facts = {
            "is_done": self._is_done,
            "tokens": stats.run_tokens,
            "steps": stats.steps,
            "rounds": stats.rounds,
            "longest_step_s": self._longest_step_s,
            "longest_result_s": self._longest_result_s,
            "anchors": self._anchors,
        }
        fresh = self._at.file("fresh")
        fresh.write_text(json.dumps(facts))
        fresh.replace(self._at.file("facts"))


def be_member(at: Station, case: Case | None) -> None:
    """Train as a member until the run's end."""
    at.enter()
    fault = None
    if case is not None and case.rank == at.rank and not at.life:
        fault = _Fault(case, at.home)
        fault.arm()
    try:
        _Trainee(at, case, fault).train()
    except laconic.LaconicError as error:
        print(f"laconic: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
