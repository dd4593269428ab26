"""One worker of a job, as torchrun starts it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from laconic.errors import TaskError
from laconic.measure.records import Recorder, forget_after
from laconic.measure.tasks import TASKS
from laconic.measure.train.checkpoint import forget_checkpoint
from laconic.measure.train.gossip import trainer_for
from laconic.measure.train.interface import interface_bytes
from laconic.measure.train.job import Job
from laconic.measure.train.progress import Progress
from laconic.measure.train.result import DIVERGED, Result, summarize
from laconic.measure.train.trainer import Trainer
from laconic.server import serve

_PR_SET_PDEATHSIG = 1
_AS_LONG_AS_IT_TAKES = timedelta(days=30)
_TO_MEET = timedelta(minutes=5)  # workers may still be loading their data


def is_worker() -> bool:
    """Whether this process is a rank of a job, started by torchrun or as if by it."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def work(job: Job, tell: Callable[[Result], None]) -> int:
    """Train and measure, or serve; the worker that leads in the end tells the result. 0, or DIVERGED."""
    _end_with_the_launcher()
    if int(os.environ["RANK"]) < job.servers:
        return _serve(job)
    torch.manual_seed(job.seed)
    device = _device(job)
    data = TASKS[job.task].load(job.data)
    with _process_group(job.backend):
        trainer = trainer_for(job, data, device)
        first = trainer.resume() if job.resume else 0
        if job.out is not None and trainer.council.place == 0:
            if first:
                forget_after(job.out, first)
            else:
                forget_checkpoint(job.out)
        with _Desk(job, trainer) as desk:
            desk.write("job", **job.facts(), workers_seen=trainer.num_workers, first_step=first)
            if first == 0:
                _evaluate(trainer, desk)
            for step in range(first, trainer.num_steps):
                desk.step(trainer.step(step))
                if step + 1 == trainer.num_steps:
                    trainer.finish()
                if (step + 1) % job.eval_every == 0 or step + 1 == trainer.num_steps:
                    _evaluate(trainer, desk)
                if trainer.diverged_at is not None:
                    break
            result = summarize(trainer)
            desk.write("result", **result.as_dict())
            if desk.leads:
                tell(result)
            trainer.session.close()
            if job.servers and not job.asks_servers:
                dist.barrier()  # lets the servers go, which stood by
        return 0 if result.diverged_at is None else DIVERGED


def _serve(job: Job) -> int:
    """Answer the workers of a job to its end; under a scheme that asks no server, be there, as rank 0 must."""
    with _process_group(job.backend, timeout=_TO_MEET if job.asks_servers else _AS_LONG_AS_IT_TAKES):
        if job.asks_servers:
            facts = _link_facts(interface_bytes())
            serve(job.scheme, servers=range(job.servers), timeout_s=job.server_timeout, facts=facts)
        else:
            dist.barrier()
    return 0


def _link_facts(before: tuple[int, int] | None) -> Callable[[], dict[str, int]]:
    """What the interface counts from here on: a lab stands longer than one run in it."""

    def facts() -> dict[str, int]:
        now = interface_bytes()
        if now is None or before is None:
            return {}
        return {"link_bytes_out": now[0] - before[0], "link_bytes_in": now[1] - before[1]}

    return facts


class _Desk:
    """Where the worker that leads writes records and shows progress; another takes over where that one has died."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._job, self._trainer = job, trainer
        self._open = ExitStack()
        self.leads = False
        self._sit_down(keeps_old=job.resume)

    def _sit_down(self, *, keeps_old: bool) -> None:
        self.leads = self._trainer.council.place == 0
        folder = self._job.out if self.leads else None
        self._records = self._open.enter_context(Recorder(folder, keeps_old=keeps_old))
        self._progress = self._open.enter_context(Progress(self._job, self._trainer, shown=self.leads))

    def write(self, kind: str, **fact: Any) -> None:
        if not self.leads and self._trainer.council.place == 0:
            self._sit_down(keeps_old=True)
        self._records.write(kind, **fact)

    def step(self, fact: dict[str, Any]) -> None:
        self.write("step", **fact)
        self._progress.step(fact)

    def evaluation(self, fact: dict[str, Any]) -> None:
        self.write("eval", **fact)
        self._progress.evaluation(fact)

    def __enter__(self) -> _Desk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def _end_with_the_launcher() -> None:
    """Let the kernel end this worker when its launcher is killed, which then cannot do so itself (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _evaluate(trainer: Trainer, desk: _Desk) -> None:
    desk.evaluation(trainer.evaluate())
    trainer.save()


def _device(job: Job) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TaskError("--device is cuda, but torch sees no CUDA device here; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def _process_group(backend: str, timeout: timedelta | None = None) -> Iterator[None]:
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
