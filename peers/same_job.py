"""What every peer shares: laconic's own job, clock and evaluation, so that only the averaging is the peer's."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from laconic.session import PHASES, Stats
from laconic_lab.cli.jobs import add_job_options, job_of
from laconic_lab.train import Job
from laconic_lab.train.course import Course
from laconic_lab.train.launch import rank_variables
from laconic_lab.train.loop import TrainingLoop
from laconic_lab.train.measurement import Spent
from laconic_lab.train.optimizer import Updater
from laconic_lab.train.worker_group import ProcessWorkers

_CPU = torch.device("cpu")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of `laconic train`, but for --scheme, and --every."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job_options(options, without=("scheme",))
    options.add_argument("--every", type=int, default=16, help="steps between two averages (default 16)")
    return options


@dataclass(frozen=True)
class Worker:
    """One host's share of a job: the model that `laconic train` would draw, its optimizer and its examples."""

    job: Job
    course: Course
    model: nn.Module
    updater: Updater

    @property
    def rank(self) -> int:
        return self.course.rank


def worker_of(asked: argparse.Namespace) -> Worker:
    """The worker of this host of the lab, with what torch.distributed looks for in its environment."""
    rank = int(os.environ["LACONIC_HOST"])
    num_workers = int(os.environ["LACONIC_HOSTS"])
    os.environ.update(rank_variables(rank, num_workers, 0))
    # As many as `laconic train --hosts` gives; Accelerate would set every core for each host.
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    torch.set_num_threads(num_threads)
    job = job_of(asked, scheme="silent", workers=num_workers)
    torch.manual_seed(job.seed)
    course = Course(job, job.load_data(), rank, num_workers)
    model = course.model(_CPU)
    return Worker(job, course, model, course.updater(model))


def train(worker: Worker, net: nn.Module, average: Callable[[], object]) -> None:
    """Train to the end, with `average` after each step; rank 0 prints one JSON line an evaluation.

    `net` is the model as the peer wraps it. Needs the process group of all workers, for the evaluation.
    """
    learner = _PeerLearner(worker, net, average)
    loop = TrainingLoop(worker.job, worker.course, learner, ProcessWorkers(None, _CPU))
    loop.run_(_Printer(loop))


def leave() -> NoReturn:
    """End this process once all have come here, whatever threads a peer has left; some of theirs never end."""
    dist.barrier()
    os._exit(0)


class _PeerLearner:
    """A learner of laconic's training loop that leaves what is sent to the peer."""

    owns_model = True

    def __init__(self, worker: Worker, net: nn.Module, average: Callable[[], object]) -> None:
        self.model = worker.model
        self.updater = worker.updater
        self._course = worker.course
        self._net = net
        self._average = average
        self._none = Stats("peer", "none", worker.course.num_workers, 0, 0, 0, 0, 0, {}, dict.fromkeys(PHASES, 0.0))

    def stats(self, *, ages: bool = False) -> Stats:
        return self._none  # a peer counts no bytes; the interface does

    def learn_(self, step: int) -> float:
        self.updater.optimizer.zero_grad()
        loss = self._course.backward_(self._net, self.updater, step, _CPU)
        self.updater.apply_()
        self._average()
        return float(loss)

    def finish_(self) -> Spent:
        return Spent()

    @torch.no_grad()
    def score(self, *, is_last: bool) -> tuple[list[float], dict[str, Any]]:
        """Score the mean of all models, of whose test each worker does a part, as laconic does."""
        own = [p.detach().clone() for p in self.model.parameters()]
        for parameter in self.model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(self._course.num_workers)
        sums = torch.tensor(self._course.score(self.model, _CPU, self._course.rank, self._course.num_workers))
        dist.all_reduce(sums)
        for parameter, before in zip(self.model.parameters(), own, strict=True):
            parameter.copy_(before)
        return sums.tolist(), {}


class _Printer:
    """Prints evaluations, on rank 0."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._link_bytes_out = 0

    def step(self, fact: dict[str, Any]) -> None:
        self._link_bytes_out += fact.get("link_bytes_out", 0)

    def evaluation(self, fact: dict[str, Any]) -> None:
        if self._loop.course.rank == 0:
            told = {name: fact[name] for name in ("step", "seconds", "loss")}
            print(json.dumps({**told, "link_bytes_out": self._link_bytes_out}), flush=True)
