"""What one rank of a job does here: train as ever, and meet its fault at the phase and step that were drawn.

Imported once by the process that ranks are forked from, with all that a rank needs: torch alone takes 4 s of a core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it when it is first built

from laconic import cli
from laconic.paths import Exchange
from laconic.replicas import Follower
from laconic.replicas.gossip import GossipPolicy
from laconic.server.serve import _RequestHandler
from laconic.session import Session
from laconic.transport import TcpMailbox
from laconic.transport.connection import Connection
from laconic_lab.chaos.mass import Tally, keeps_all
from laconic_lab.chaos.schedule import Case
from laconic_lab.network import enter
from laconic_lab.tasks import TASKS, Data
from laconic_lab.train import resume, worker
from laconic_lab.train.job import Job
from laconic_lab.train.loop import TrainingLoop

_SMALL = 64  # examples: what is looked at here is not what is learned
_SLOW_S = 1.0
_ROUNDS_A_STEP = 2  # of a server
_TRICKLED_BYTES = 256
_FULL_BYTES = 65_536

torch.set_num_threads(1)


def _small(data: Data) -> Data:
    cut = {name: getattr(data, name)[:_SMALL] for name in ("test_inputs", "test_targets")}
    return dataclasses.replace(data, **cut)


_DATA = _small(TASKS["fashion-mnist"].load(None, None))


def be_rank(
    rank: int, variables: dict[str, str], arguments: list[str], said: Path, case: Case | None, namespace: str
) -> None:
    """Run `laconic train` as one rank, on a host of a lab if one is named.

    What it says, a digest of its last model and a file `struck` go to a folder.
    """
    if namespace:
        enter.join(namespace)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(variables)
    Job.load_data = lambda self: _DATA  # type: ignore[method-assign]
    _after(TrainingLoop, "run_", lambda loop: (said / f"digest-{rank}").write_text(_digest(loop.learner.model)))
    if keeps_all(arguments[arguments.index("--scheme") + 1]):
        _tally(Tally(said, rank))
    if case is not None and case.rank == rank:
        _plan(case, said / "struck")
    code = 1
    with contextlib.suppress(SystemExit):
        code = cli.main(["train", *arguments])
    os._exit(code)


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _tally(tally: Tally) -> None:
    """Note what this rank gives, and what is applied, up to each checkpoint."""
    _before(Session, "begin", lambda _, bucket: tally.give(bucket))
    end = Session.end_

    def end_(self: Session, exchange: Exchange) -> None:
        end(self, exchange)
        tally.apply(exchange.work.bucket)

    Session.end_ = end_  # type: ignore[method-assign]
    _before(resume, "save_checkpoint", lambda _, step, *rest: tally.save(step))
    _after(worker, "resume_", lambda loop: tally.load(loop.steps_done))


def _plan(case: Case, struck: Path) -> None:
    """Let the fault befall this process once, at its phase of its step."""
    steps = [-1]  # the one under way
    pending = [case]

    def meet(phase: str) -> None:
        if pending and phase == case.phase and steps[0] >= case.number:
            pending.clear()
            struck.touch()
            _befall(case)

    def count(*_: Any) -> None:
        steps[0] += 1

    def begin(*_: Any) -> None:
        meet("choose")

    _before(TrainingLoop, "step_", count)
    if parse_is_gossip(case.scheme):
        _before(Follower, "step", begin)
        _before(TcpMailbox, "ask", lambda *_: meet("encode"))
        _before(TcpMailbox, "ask", lambda *_: threading.Timer(0.002, meet, ("talk",)).start())
        _before(GossipPolicy, "move_", lambda *_: meet("apply"))
    else:
        _before(Session, "begin", begin)
        _after(Session, "begin", lambda *_: meet("encode"))
        _before(Session, "send", lambda *_: meet("talk"))
        _before(Session, "end_", lambda *_: meet("apply"))
    _before(resume, "save_checkpoint", lambda *_: meet("checkpoint"))
    rounds = [0]

    def count_round(*_: Any) -> None:
        rounds[0] += 1
        steps[0] = rounds[0] // _ROUNDS_A_STEP
        meet(case.phase)

    _before(_RequestHandler, "handle_round", count_round)


def parse_is_gossip(text: str) -> bool:
    """Whether its workers meet without the others."""
    return Job(scheme=text).is_gossip


def _befall(case: Case) -> None:
    if case.fault in ("kill", "restart"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault in ("stop", "pause"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case.fault == "slow":
        time.sleep(_SLOW_S)
    elif case.fault == "trickle":
        _trickle_()
    elif case.fault == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _trickle_() -> None:
    """Let the next bytes on connections of our own leave one by one."""
    left = [_TRICKLED_BYTES]
    send = Connection._send

    def trickling(self: Connection, view: memoryview, flags: int = 0) -> None:
        while view and left[0] > 0:
            left[0] -= 1
            send(self, view[:1])
            view = view[1:]
            time.sleep(_SLOW_S / _TRICKLED_BYTES)
        send(self, view, flags)

    Connection._send = trickling  # type: ignore[method-assign]


def _before(owner: Any, name: str, act: Callable[..., object]) -> None:
    real = getattr(owner, name)

    def acting(*arguments: Any, **options: Any) -> Any:
        act(*arguments)
        return real(*arguments, **options)

    setattr(owner, name, acting)


def _after(owner: Any, name: str, act: Callable[..., object]) -> None:
    real = getattr(owner, name)

    def acting(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        act(arguments[0])
        return found

    setattr(owner, name, acting)
