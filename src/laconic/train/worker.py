"""One worker of a job, as torchrun starts it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from laconic.errors import TaskError
from laconic.records import Recorder, forget_after
from laconic.tasks import TASKS
from laconic.train.gossip import trainer_for
from laconic.train.job import Job
from laconic.train.progress import Progress
from laconic.train.result import Result, summarize
from laconic.train.trainer import Trainer

_PR_SET_PDEATHSIG = 1


def is_worker() -> bool:
    """Whether this process was started by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def work(job: Job) -> Result:
    """Train and measure; every rank returns the result, in which the times are its own."""
    _end_with_the_launcher()
    torch.manual_seed(job.seed)
    device = _device(job)
    data = TASKS[job.task].load(job.data)
    with _process_group(job.backend):
        trainer = trainer_for(job, data, device)
        lead = dist.get_rank() == 0
        folder = job.out if lead else None
        first = trainer.resume() if job.resume else 0
        if first and folder is not None:
            forget_after(folder, first)
        with Recorder(folder, keeps_old=job.resume) as records, Progress(job, trainer, shown=lead) as progress:
            records.write("job", **job.facts(), workers_seen=dist.get_world_size(), first_step=first)
            if first == 0:
                _evaluate(trainer, records, progress)
            for step in range(first, trainer.num_steps):
                fact = trainer.step(step)
                records.write("step", **fact)
                progress.step(fact)
                if step + 1 == trainer.num_steps:
                    trainer.finish()
                if (step + 1) % job.eval_every == 0 or step + 1 == trainer.num_steps:
                    _evaluate(trainer, records, progress)
                if trainer.diverged_at is not None:
                    break
            result = summarize(trainer)
            records.write("result", **result.as_dict())
            trainer.session.close()
        return result


def _end_with_the_launcher() -> None:
    """Let the kernel end this worker when its launcher is killed, which then cannot do so itself (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _evaluate(trainer: Trainer, records: Recorder, progress: Progress) -> None:
    fact = trainer.evaluate()
    records.write("eval", **fact)
    progress.evaluation(fact)
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
def _process_group(backend: str) -> Iterator[None]:
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()
