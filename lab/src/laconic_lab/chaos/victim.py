"""One rank of a job: it trains as ever, and meets its fault at the phase and step that were drawn.

Imported once by the process that ranks are forked from, with all that a rank needs: torch alone takes 4 s of a core.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
import torch._dynamo  # DDP imports it when it is first built

from laconic.cli import as_worker
from laconic.testing import at_fault_point
from laconic_lab.chaos.mass import Tally, keeps_all
from laconic_lab.chaos.schedule import TRUST_FAULTS, Case
from laconic_lab.network import enter
from laconic_lab.tasks import TASKS, Data
from laconic_lab.train.job import Job
from laconic_lab.train.worker import work

# The fault points at which each phase of schedule.PHASES begins, in a step of gradients or of gossip, and between them.
POINTS = {
    "choose": ("bucket.begin", "gossip.step"),
    "encode": ("bucket.encoded", "gossip.request"),
    "talk": ("bucket.send", "gossip.sent"),
    "apply": ("bucket.apply", "gossip.apply"),
    "training": ("train.step",),
    "evaluation": ("train.evaluate",),
    "averaging": ("train.average",),
    "checkpoint": ("train.save",),
    "resume": ("train.resume",),
}
_SMALL = 64  # examples: what is looked at here is not what is learned
_SLOW_S = 1.0
_ROUNDS_A_STEP = 2  # of a server
_TRICKLED_BYTES = 256
_FULL_BYTES = 65_536
_Handlers = list[tuple[str, Callable[..., object]]]  # by fault point
_lasting = ExitStack()  # what is set until the process ends

torch.set_num_threads(1)


def _small(data: Data) -> Data:
    cut = {name: getattr(data, name)[:_SMALL] for name in ("test_inputs", "test_targets")}
    return dataclasses.replace(data, **cut)


_DATA = _small(TASKS["fashion-mnist"].load(None, None))


def be_rank(rank: int, variables: dict[str, str], job: Job, home: Path, case: Case | None, namespace: str) -> None:
    """Do what `laconic train` does as one rank, on a host of a lab if one is named.

    What it prints, a digest of its last model and a file `struck` go to a folder.
    """
    if namespace:
        enter.join(namespace)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(home / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(variables)
    digest = home / f"digest-{rank}"
    handlers: _Handlers = [("train.end", lambda loop: digest.write_text(_digest(loop.learner.model)))]
    if keeps_all(job.scheme):
        handlers += _tallying(Tally(home, rank))
    if case is not None and case.rank == rank:
        handlers += _striking(case, home / "struck")
    for point, handler in handlers:
        _lasting.enter_context(at_fault_point(point, handler))
    os._exit(as_worker(lambda: work(job, lambda result: None, _DATA)))


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _tallying(tally: Tally) -> _Handlers:
    """Note what this rank gives, and what is applied, up to each checkpoint."""
    return [
        ("bucket.begin", tally.give),
        ("bucket.applied", tally.apply),
        ("train.save", lambda loop: tally.save(loop.steps_done)),
        ("train.resumed", lambda loop: tally.load(loop.steps_done)),
    ]


def _striking(case: Case, struck: Path) -> _Handlers:
    """Let the fault befall this process once, at its phase of its step, or at a server's round of that step."""
    step = -1  # the one under way
    num_rounds = 0

    def strike(*_: object) -> None:
        if not struck.exists() and (step >= case.number or case.phase == "resume"):
            struck.touch()
            _befall(case)

    def count_step(_: object) -> None:
        nonlocal step
        step += 1

    def count_round() -> None:
        nonlocal num_rounds, step
        num_rounds += 1
        step = num_rounds // _ROUNDS_A_STEP
        strike()

    if case.fault in TRUST_FAULTS:  # which its environment holds from the start
        struck.touch()
        return []
    points = POINTS[case.phase]
    return [("train.step", count_step), ("server.round", count_round), *((point, strike) for point in points)]


def _befall(case: Case) -> None:
    if case.fault in ("kill", "restart"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault in ("stop", "pause"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case.fault == "slow":
        time.sleep(_SLOW_S)
    elif case.fault == "trickle":
        _lasting.enter_context(at_fault_point("connection.send", _Trickle()))
    elif case.fault == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class _Sends(Protocol):
    def send_some(self, view: memoryview) -> int: ...


class _Trickle:
    """Lets the next bytes on connections of our own leave one by one."""

    _left = _TRICKLED_BYTES

    def __call__(self, view: memoryview, connection: _Sends) -> memoryview:
        while view and self._left > 0:
            self._left -= 1
            view = view[connection.send_some(view[:1]) :]
            time.sleep(_SLOW_S / _TRICKLED_BYTES)
        return view
