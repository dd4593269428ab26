"""Faults on members that come and go and on their server: who is killed, stopped or cut off returns, at any phase."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.errors import LaunchError
from laconic_lab.chaos.processes import is_stopped
from laconic_lab.chaos.schedule import Case, Outcome
from laconic_lab.network import Lab

if TYPE_CHECKING:  # which brings torch and a data set, for the process that others are forked from
    from laconic_lab.chaos.member_process import Station

NUM_MEMBERS = 4
_PORT = 7700
_AWAY_S = 1.7  # some 10 % of a run, and more than twice the wait budget: who waits for one that is away is found out
_JOIN_AT = 8  # rounds of the others, after which the last member joins
_DEADLINE_S = 240.0
_POLL_S = 0.01
_LOSS_RTOL = 0.01
_UNDISTURBED = 3  # runs, whose mean a loss is held beside
_CONTEXT: Any = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["laconic_lab.chaos.victim", "laconic_lab.chaos.member_process"])


def check(case: Case, lab: Lab | None = None) -> Outcome:
    """Let a fault befall a member or the server, here or on hosts of a lab of which the first is the server's."""
    from laconic_lab.chaos.member_process import SERVER, WAIT_BUDGET_S

    calm = undisturbed(case.scheme, lab)
    run = _Run(case.scheme, lab, case)
    facts = run.train()
    others = [each for rank, each in facts.items() if rank != case.rank]
    step_s = max(each["longest_step_s"] for each in others)
    result_s = max(each["longest_result_s"] for each in others)
    broken = list(run.broken)
    if step_s > WAIT_BUDGET_S + calm["step_s"]:
        broken.append(f"no step of the others takes longer than a wait budget: {step_s:.2f} s")
    if case.rank != SERVER and case.phase != "found" and result_s > WAIT_BUDGET_S + calm["result_s"]:
        broken.append(f"no result comes later to the others than a wait budget: {result_s:.2f} s")
    if not all(each["is_done"] for each in facts.values()):
        late = [rank for rank, each in facts.items() if not each["is_done"]]
        broken.append(f"all come to the end within {_DEADLINE_S:g} s: not {late}; {run.last_lines}")
    losses = [run.loss / calm["loss"]]
    if losses[0] > 1 + _LOSS_RTOL:  # runs differ by as much that nothing befalls: two more decide
        for _ in range(2):
            again = _Run(case.scheme, lab, case)
            again.train()
            losses.append(again.loss / calm["loss"])
    loss = statistics.median(losses)
    if loss > 1 + _LOSS_RTOL:
        broken.append(f"the loss is within {_LOSS_RTOL:.0%} of an undisturbed one: {losses} of it")
    measured = {"loss": loss, "runs": len(losses), "spread": calm["spread"], "step_s": step_s, "result_s": result_s}
    return Outcome(broken, run.is_struck, {name: round(value, 4) for name, value in measured.items()})


@cache
def undisturbed(scheme: str, lab: Lab | None) -> dict[str, float]:
    """The mean loss of runs that nothing befalls, its spread, and the longest that a member then waits for a result."""
    losses, steps_s, results_s = [], [], []
    for _ in range(_UNDISTURBED):
        run = _Run(scheme, lab, None)
        facts = run.train()
        if not all(each["is_done"] for each in facts.values()) or run.broken:
            raise LaunchError(f"members do not even train undisturbed here: {run.broken}, {run.last_lines}")
        losses.append(run.loss)
        steps_s.append(max(each["longest_step_s"] for each in facts.values()))
        results_s.append(max(each["longest_result_s"] for each in facts.values()))
    mean = statistics.mean(losses)
    return {
        "loss": mean,
        "spread": (max(losses) - min(losses)) / mean,
        "step_s": max(steps_s),
        "result_s": max(results_s),
    }


class _Run:
    """A server and its members, one of which may be struck."""

    def __init__(self, scheme: str, lab: Lab | None, case: Case | None) -> None:
        self._scheme = scheme
        self._lab = lab
        self._case = case
        self._processes: dict[int, Any] = {}  # by rank
        self._lives: dict[int, int] = {}
        self._address = f"{lab.hosts[0].address}:{_PORT}" if lab else f"127.0.0.1:{_free_port()}"
        self.num_members = len(lab.hosts) - 1 if lab else NUM_MEMBERS
        self.broken: list[str] = []
        self.loss = float("nan")
        self.is_struck = False
        self.last_lines = ""  # that each process printed

    def train(self) -> dict[int, dict[str, Any]]:
        """Train to the end; what each member wrote down last."""
        from laconic_lab.chaos.member_process import SERVER

        with tempfile.TemporaryDirectory(prefix="laconic-chaos-") as folder, ExitStack() as ending:
            self._home = Path(folder)
            ending.callback(self._end)
            self._start(SERVER)
            late = self._late()
            for rank in range(1, self.num_members + 1):
                if rank != late:
                    self._start(rank)
            self._wait(late)
            facts = {rank: self._facts(rank) for rank in range(1, self.num_members + 1)}
            if all(each["is_done"] for each in facts.values()):
                self.loss = self._loss()
            self.last_lines = self._last_lines()
            self.is_struck = (self._home / "struck").exists()
            self._look(facts)
            return facts

    def _late(self) -> int:
        """The member that joins when the others have trained for a while."""
        if self._case is not None and self._case.phase == "join" and self._case.rank:
            return self._case.rank
        return self.num_members

    def _start(self, rank: int) -> None:
        from laconic_lab.chaos import member_process

        life = self._lives[rank] = self._lives.get(rank, -1) + 1
        at = self._station(rank, life)
        target: Callable[..., None] = member_process.be_member
        arguments: tuple[Any, ...] = (at, self._case)
        if rank == member_process.SERVER:
            target, arguments = member_process.serve, (at, self._scheme, self._case)
        self._processes[rank] = _CONTEXT.Process(target=target, args=arguments)
        self._processes[rank].start()
        if rank == member_process.SERVER:
            deadline = time.monotonic() + _DEADLINE_S
            while "members dial" not in (at.file("err").read_text() if at.file("err").exists() else ""):
                if time.monotonic() > deadline:
                    raise LaunchError(f"the server does not begin: {self._last_lines()}")
                time.sleep(_POLL_S)

    def _station(self, rank: int, life: int) -> Station:
        from laconic_lab.chaos.member_process import Station

        return Station(rank, life, self._address, self._home, self._lab.hosts[rank].namespace if self._lab else "")

    def _wait(self, late: int) -> None:
        """Start who is late, bring back who was struck, and wait for the end."""
        case = self._case
        deadline = time.monotonic() + _DEADLINE_S
        back_at = 0.0
        is_back = case is None
        others = [rank for rank in range(1, self.num_members + 1) if rank != late]
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            members = [process for rank, process in self._processes.items() if rank]
            if late not in self._lives:
                if min(self._facts(rank)["rounds"] for rank in others) >= _JOIN_AT:
                    self._start(late)
            elif not any(process.is_alive() for process in members) and (is_back or not back_at):
                return
            if case is None or is_back or not (self._home / "struck").exists():
                continue
            if not back_at and self._is_away(case):
                back_at = time.monotonic() + _AWAY_S
                if case.fault == "cut" and self._lab is not None:
                    self._lab.cut(case.rank)
                    os.kill(self._processes[case.rank].pid, signal.SIGCONT)
            elif back_at and time.monotonic() > back_at:
                is_back = True
                self._bring_back(case)

    def _is_away(self, case: Case) -> bool:
        process = self._processes[case.rank]
        return not process.is_alive() if case.fault in ("kill", "restart") else is_stopped(process.pid)

    def _bring_back(self, case: Case) -> None:
        if case.fault == "stop":
            os.kill(self._processes[case.rank].pid, signal.SIGCONT)
        elif case.fault == "cut" and self._lab is not None:
            self._lab.heal(case.rank)
        else:
            self._start(case.rank)

    def _facts(self, rank: int) -> dict[str, Any]:
        """What a member wrote down last, of all its lives."""
        facts: dict[str, Any] = {
            "is_done": False,
            "rounds": 0,
            "longest_step_s": 0.0,
            "longest_result_s": 0.0,
            "anchors": {},
        }
        for life in range(self._lives.get(rank, -1) + 1):
            path = self._home / f"facts-{rank}-{life}"
            if path.exists():
                latest = json.loads(path.read_text())
                facts = latest | {"anchors": facts["anchors"] | latest["anchors"]}
        return facts

    def _look(self, facts: dict[int, dict[str, Any]]) -> None:
        """Check what holds after any fault: equal anchors, and errors in one line."""
        digests: dict[str, int] = {}
        for each in facts.values():
            for version, digest in each["anchors"].items():
                if digests.setdefault(version, digest) != digest:
                    self.broken.append(f"anchors are equal: not fragment/version {version}")
        for path in sorted(self._home.glob("err-*")):
            text = path.read_text(errors="replace")
            if "Traceback" in text:
                self.broken.append(f"an error is one line: {path.name} has {text[-300:]!r}")

    def _last_lines(self) -> str:
        texts = {path.name: path.read_text(errors="replace").strip() for path in sorted(self._home.glob("err-*"))}
        return "; ".join(f"{name}: {text.splitlines()[-1][:200]}" for name, text in texts.items() if text)

    def _loss(self) -> float:
        """The anchor's, as a member that joins at the end receives it."""
        from laconic_lab.chaos import member_process

        observer = _CONTEXT.Process(target=member_process.observe, args=(self._station(self.num_members, 9),))
        observer.start()
        observer.join()
        return float((self._home / "loss").read_text())

    def _end(self) -> None:
        if self._lab is not None and self._case is not None:
            self._lab.heal(self._case.rank)
        for process in self._processes.values():
            if process.is_alive():
                process.kill()  # a stopped one too
            process.join()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
