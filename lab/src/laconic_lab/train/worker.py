"""One worker of a job, as torchrun starts it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from laconic import follow
from laconic.cli import say
from laconic.planning import AUTOMATIC, Plan
from laconic.server import serve
from laconic.transport import own_group, place_of_texts, world, world_without
from laconic_lab.errors import TaskError
from laconic_lab.records import Recorder, forget_after
from laconic_lab.tasks import Data
from laconic_lab.train import checkpoint
from laconic_lab.train.checkpoint import find_checkpoint
from laconic_lab.train.course import Course
from laconic_lab.train.ddp import DdpLearner
from laconic_lab.train.following import FollowingLearner
from laconic_lab.train.job import DEFAULT_STEPS, Job
from laconic_lab.train.loop import Observer, TrainingLoop
from laconic_lab.train.measurement import interface_bytes, link_bytes_since
from laconic_lab.train.mps import uses_mps
from laconic_lab.train.planning import Losses, plan_here, plan_script
from laconic_lab.train.result import DIVERGED, Result, show, summarize
from laconic_lab.train.resume import check_saved, resume_, save

_PR_SET_PDEATHSIG = 1
_AS_LONG_AS_IT_TAKES = timedelta(days=30)
_TO_MEET = timedelta(minutes=5)  # workers may still be loading their data


def work(job: Job, tell: Callable[[Result], None], data: Data | None = None) -> int:
    """Train and measure, or serve; the worker that leads in the end tells the result. 0, or DIVERGED.

    `data` stands in for the task's own.
    """
    end_with_the_launcher()
    if int(os.environ["RANK"]) < job.servers:
        return _serve(job)
    torch.manual_seed(job.seed)
    device = device_of(job)
    data = data or job.load_data()
    with process_group(job.backend):
        if job.auto:
            job = settle_scheme(job, data, device)
        learner = make_learner(job, data, device)
        loop = TrainingLoop(job, learner.course, learner, learner.group)
        if job.resume:
            resume_(loop)
        if job.out is not None and loop.group.place == 0:
            checkpoint.forget_after(job.out, loop.steps_done)
            if job.resume:
                forget_after(job.out, loop.steps_done)
        result = run_logged(loop, uses_mps=uses_mps(job))
        if loop.group.place == 0:
            tell(result)
        learner.session.close()
        if job.servers and not job.asks_servers:
            dist.barrier()  # lets the servers go, which stood by
        check_saved(loop)
        return 0 if result.diverged_at is None else DIVERGED


def work_plan(job: Job, candidates: Sequence[str], steps: int, tell: Callable[[Plan], None]) -> int:
    """Plan instead of training; the first worker tells."""
    end_with_the_launcher()
    torch.manual_seed(job.seed)
    device = device_of(job)
    data = job.load_data()
    with process_group(job.backend):
        planned = plan_here(job, data, device, own_group(world(), device), candidates, steps)
        if dist.get_rank() == 0:
            tell(planned)
    return 0


def work_script(words: Sequence[str], candidates: Sequence[str], steps: int, tell: Callable[[Plan], None]) -> int:
    """Plan a user's script, which makes the process group itself; the first worker tells."""
    end_with_the_launcher()
    planned = plan_script(words, candidates, steps)
    if dist.get_rank() == 0:
        tell(planned)
    return 0


def slowest(own: float) -> float:
    """The largest of everyone's numbers, on all workers."""
    device = place_of_texts(world())
    largest = torch.tensor([own], dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _say_once(text: str) -> None:
    """Talk of the first worker, on stderr."""
    if dist.get_rank() == 0:
        say(f"laconic: {text}")


class LossObserver(Observer):
    """Notes evaluations alone."""

    def __init__(self) -> None:
        self.losses: Losses = []

    def evaluation(self, fact: dict[str, Any]) -> None:
        self.losses.append((fact["step"], fact["loss"]))


def settle_scheme(job: Job, data: Data, device: torch.device) -> Job:
    """The job under what a plan picks, which the first worker says; one that is resumed goes on as it was."""
    if job.resume:
        assert job.out is not None
        return replace(job, scheme=find_checkpoint(job.out).about["scheme"], auto=False)
    planned = plan_here(job, data, device, own_group(world(), device), AUTOMATIC, DEFAULT_STEPS)
    _say_once(f"auto picks {planned.pick}: {planned.reasons[0]}")
    torch.manual_seed(job.seed)  # so that the run is that of the scheme itself
    return replace(job, scheme=planned.pick, auto=False)


def make_learner(job: Job, data: Data, device: torch.device) -> DdpLearner | FollowingLearner:
    """This process's share of the data and its model, under the job's scheme; a call that all workers make."""
    course = Course(job, data, dist.get_rank() - job.servers, dist.get_world_size() - job.servers)
    everyone = world_without(range(job.servers)) if job.servers else world()
    group = own_group(everyone, device, job.server_timeout)  # whom nobody waits for any longer than that
    if job.follows:
        servers = range(job.servers) if job.asks_servers else ()
        followed = partial(follow, scheme=job.scheme, group=group, servers=servers, timeout_s=job.server_timeout)
        return FollowingLearner(job, course, device, course.model(device), followed)
    return DdpLearner(job, course, device, group)


def _serve(job: Job) -> int:
    """Answer the workers of a job to its end; under a scheme that asks no server, be there, as rank 0 must."""
    with process_group(job.backend, timeout=_TO_MEET if job.asks_servers else _AS_LONG_AS_IT_TAKES):
        if job.asks_servers:
            facts = partial(link_bytes_since, interface_bytes())  # a lab stands longer than one run in it
            servers = range(job.servers)
            serve(job.scheme, servers=servers, timeout_s=job.server_timeout, wait_budget_s=job.wait, facts=facts)
        else:
            dist.barrier()
    return 0


def run_logged(
    loop: TrainingLoop, *, uses_mps: bool = False, saves: bool = True, say: Callable[[str], None] = say
) -> Result:
    """Train to the end; the worker that leads records it, and says how it goes."""
    job = loop.job
    with _LeadersLog(loop, saves=saves, say=say) as log:
        seen = {"workers_seen": loop.course.num_workers, "mps": uses_mps}
        log.write("job", **job.facts(), **seen, first_step=loop.steps_done)
        loop.run_(log)
        result = summarize(loop)
        log.write("result", **result.as_dict())
    return result


class _LeadersLog(Observer):
    """The log of the worker that leads: records and progress; another takes over where that one has died."""

    def __init__(self, loop: TrainingLoop, *, saves: bool, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._saves = saves
        self._say = say
        self._open = ExitStack()
        self._begin(keeps_old=loop.job.resume)

    def _begin(self, *, keeps_old: bool) -> None:
        self._leads = self._loop.group.place == 0
        folder = self._loop.job.out if self._leads else None
        self._records = self._open.enter_context(Recorder(folder, keeps_old=keeps_old))

    def write(self, kind: str, **fact: Any) -> None:
        if not self._leads and self._loop.group.place == 0:
            self._begin(keeps_old=True)
        self._records.write(kind, **fact)

    def step(self, fact: dict[str, Any]) -> None:
        self.write("step", **fact)

    def evaluation(self, fact: dict[str, Any]) -> None:
        self.write("eval", **fact)
        if self._leads:
            show(self._loop, fact, self._say)
        if self._saves:
            save(self._loop)

    def __enter__(self) -> _LeadersLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def end_with_the_launcher() -> None:
    """Let the kernel end this worker when its launcher is killed, which then cannot do so itself (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def check_device(device: str) -> None:
    """TaskError where this machine has no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise TaskError("--device is cuda, but torch sees no CUDA device here; use --device cpu")


def device_of(job: Job) -> torch.device:
    """The device that this process computes on; an error where there is no such device."""
    check_device(job.device)
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(backend: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Be a rank of torch.distributed inside the block, as the environment says."""
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
