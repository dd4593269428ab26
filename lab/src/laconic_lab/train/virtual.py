"""A job's workers as threads of one process: what they would send is studied without sending it."""

from __future__ import annotations

import copy
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from laconic.errors import SchemeError
from laconic.layout import Bucket, Layout
from laconic.recipes import parse
from laconic.replicas import Follower, policy_for
from laconic.scheme import GossipScheme, OuterScheme, Scheme
from laconic.session import Session, Stats
from laconic.testing import InProcess, in_process
from laconic_lab.figures import sentences
from laconic_lab.records import Recorder
from laconic_lab.tasks import Data
from laconic_lab.train.course import Course
from laconic_lab.train.following import Followed, FollowingLearner
from laconic_lab.train.job import Job
from laconic_lab.train.loop import Observer, TrainingLoop
from laconic_lab.train.measured import Spent
from laconic_lab.train.optimizer import Updater
from laconic_lab.train.result import DIVERGED, Result, summarize
from laconic_lab.train.worker import device_of
from laconic_lab.train.worker_group import EndFacts, WorkerGroup

T = TypeVar("T")
Say = Callable[[str], None]
OnGradient = Callable[[int, Bucket, Session], None]  # called by a worker before it exchanges, with its own gradient


def work_in_process(job: Job, tell: Callable[[Result], None], say: Say) -> int:
    """Train and measure; 0, or DIVERGED.

    Replicas are equal bit for bit, so one model stands for all of them: the workers take turns with it, each for its
    own batch, exchange what they found as one bucket, and the first applies it. Times are of all of them together.
    """
    scheme = parse(job.scheme)
    if not isinstance(scheme, Scheme | OuterScheme | GossipScheme):
        raise SchemeError(f"{scheme} lives inside PyTorch's DDP; leave --in-process out, or give another scheme")
    data = job.load_data()
    with Recorder(job.out) as records:
        records.write("job", **job.facts(), workers_seen=job.workers, mps=False, first_step=0)

        def train(loop: TrainingLoop, _: Session | None = None) -> Result:
            loop.run_(_VirtualObserver(loop, records, say) if loop.group.place == 0 else Observer())
            return summarize(loop)

        if isinstance(scheme, Scheme):
            result = run_virtual(job, scheme, data, train, shares_model=True)[0]
        else:
            result = follow_virtually(job, scheme, data, train)[0]
        records.write("result", **result.as_dict())
    tell(result)
    return 0 if result.diverged_at is None else DIVERGED


def run_virtual(
    job: Job,
    scheme: Scheme,
    data: Data,
    train: Callable[[TrainingLoop, Session], T],
    *,
    shares_model: bool,
    on_gradient: OnGradient | None = None,
) -> list[T]:
    """train() for each of job.workers virtual workers, around one model or with a copy each; results by rank.

    `on_gradient` is called by the first worker alone. Ctrl-C ends them all between two steps: an interrupted join of
    the workers themselves would leave them computing while the interpreter goes away.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        first = Replica(Course(job, data, 0, job.workers), device_of(job))
    rows: list[list[float]] = [[] for _ in range(job.workers)]
    interrupted = threading.Event()

    def work(transport: InProcess) -> T:
        leads = transport.rank == 0
        course = Course(job, data, transport.rank, transport.num_workers)
        replica = first if shares_model or leads else first.copy(course)
        group = VirtualWorkers(transport, rows, has_servers=job.asks_servers)
        scaler = replica.updater.grad_scaler
        session = Session(scheme, transport, loss_scale=scaler.get_scale if scaler else None)

        def before_exchange(step: int, bucket: Bucket) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt
            if on_gradient is not None and leads:
                on_gradient(step, bucket, session)

        learner = VirtualLearner(course, replica, session, group, leads or not shares_model, before_exchange)
        return train(TrainingLoop(job, course, learner, group), session)

    return _interruptible(job, work, interrupted)


def follow_virtually(
    job: Job, scheme: OuterScheme | GossipScheme, data: Data, train: Callable[[TrainingLoop], T]
) -> list[T]:
    """train() for each of job.workers virtual workers that train alone and agree now and then; results by rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        first = Course(job, data, 0, job.workers).model(device_of(job))
    interrupted = threading.Event()

    def work(transport: InProcess) -> T:
        def followed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Follower:
            options = {"in_background": False} if isinstance(scheme, OuterScheme) else {}
            return Follower(policy_for(model, optimizer, scheme, transport, **options))

        course = Course(job, data, transport.rank, transport.num_workers)
        learner = _VirtualFollower(job, course, copy.deepcopy(first), followed, interrupted)
        return train(TrainingLoop(job, course, learner, learner.group))

    return _interruptible(job, work, interrupted)


def _interruptible(job: Job, work: Callable[[InProcess], T], interrupted: threading.Event) -> list[T]:
    """work() for each worker, ended by Ctrl-C between two steps."""
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(in_process, job.workers, work, num_servers=job.servers)
        try:
            return results.result()
        except KeyboardInterrupt:
            interrupted.set()
            raise


class _VirtualFollower(FollowingLearner):
    """A worker in a thread, with a model of its own."""

    def __init__(
        self, job: Job, course: Course, model: nn.Module, followed: Followed, interrupted: threading.Event
    ) -> None:
        super().__init__(job, course, device_of(job), model, followed)
        self._interrupted = interrupted

    def learn_(self, step: int) -> float:
        if self._interrupted.is_set():
            raise KeyboardInterrupt
        return super().learn_(step)


class VirtualWorkers(WorkerGroup):
    """Threads that meet where their transport does; nothing of it is counted."""

    shares_clock: ClassVar[bool] = True

    def __init__(self, transport: InProcess, rows: list[list[float]], *, has_servers: bool) -> None:
        self._transport = transport
        self._rows = rows
        self._has_servers = has_servers
        self.place = transport.rank
        self.num_living = transport.num_workers

    def wait(self) -> None:
        """Go on when all are here."""
        self._transport.broadcast(torch.empty(0, dtype=torch.uint8), 0, 0)

    def gather(self, own: Sequence[float]) -> list[list[float]]:
        self._rows[self.place] = list(own)
        self.wait()
        rows = list(self._rows)
        self.wait()  # nobody overwrites what another still reads
        return rows

    def end_facts(self) -> EndFacts:
        """A server's bytes are those that all workers heard."""
        if not self._has_servers:
            return EndFacts()
        received = self.gather([self._transport.traffic.bytes_in])
        return EndFacts([{"bytes_out": round(sum(num_bytes for (num_bytes,) in received))}])


class Replica:
    """A model and its optimizer, with which one worker computes at a time."""

    def __init__(self, course: Course, device: torch.device, model: nn.Module | None = None) -> None:
        self.device = device
        self.model = model or course.model(device)
        self.updater = course.updater(self.model)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.layout = Layout.of(names, [p.shape for p in self.trained])
        self._turn = threading.Lock()
        self._losses: list[float] = []

    def copy(self, course: Course) -> Replica:
        """A replica of its own."""
        return Replica(course, self.device, copy.deepcopy(self.model))

    def gradient(self, course: Course, step: int) -> tuple[Tensor, float]:
        """(the gradient as one vector, the loss) of a worker at a step."""
        with self._turn:
            self.updater.optimizer.zero_grad()
            loss = float(course.backward_(self.model, self.updater, step, self.device))
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self._losses.append(loss)
        return flat, loss

    def apply_(self, flat: Tensor, *, finite: bool) -> float:
        """One step of the optimizer by what is finite; the mean loss of all batches since the last."""
        for parameter, span in zip(self.trained, self.layout.spans, strict=True):
            # In the parameter's own order of memory: on CUDA, AdamW takes no other.
            parameter.grad = torch.empty_like(parameter).copy_(flat[span.start : span.stop].view_as(parameter))
        if finite or self.updater.grad_scaler is not None:
            self.updater.apply_()
        loss = statistics.fmean(self._losses)
        self._losses = []
        return loss


@dataclass
class VirtualLearner:
    """A worker in a thread: it exchanges its gradient of a replica, and applies the answer if that is its part."""

    owns_model: ClassVar[bool] = False

    course: Course
    replica: Replica
    session: Session
    group: VirtualWorkers
    applies: bool
    before_exchange: Callable[[int, Bucket], None]

    @property
    def model(self) -> nn.Module:
        return self.replica.model

    @property
    def updater(self) -> Updater:
        return self.replica.updater

    def stats(self, *, ages: bool = False) -> Stats:
        return self.session.stats(ages=ages)

    def learn_(self, step: int) -> float:
        flat, loss = self.replica.gradient(self.course, step)
        bucket = Bucket(0, self.replica.layout, flat, is_last=True)
        self.before_exchange(step + 1, bucket)
        self.session.exchange_(bucket)
        if self.applies:
            loss = self.replica.apply_(flat, finite=self.session.last_step_finite)
        self.group.wait()  # none computes on while another applies
        return loss

    def finish_(self) -> Spent:
        return Spent()

    def score(self, *, is_last: bool) -> tuple[list[float], dict[str, Any]]:
        """The first scores all of the test data; the others wait."""
        own = [0.0, 0.0, 0.0]
        if self.group.place == 0:
            own = self.course.score(self.model, self.replica.device)
        sums = self.group.total(torch.tensor(own, dtype=torch.float64)).tolist()
        return sums, {"bytes_in": self.session.stats().bytes_in}


@dataclass
class _VirtualObserver(Observer):
    """The observer of the worker that leads: it records, and prints."""

    loop: TrainingLoop
    records: Recorder
    say: Say

    def step(self, fact: dict[str, Any]) -> None:
        self.records.write("step", **fact)

    def evaluation(self, fact: dict[str, Any]) -> None:
        self.records.write("eval", **fact)
        measure = self.loop.job.measure
        rate = self.loop.tokens_per_s(self.loop.facts[-1]["ms"]) if self.loop.facts else None
        more = f", {rate:,.0f} tokens/s" if rate else ""
        more += "".join(f", {text}" for text in sentences(vars(self.loop.learner.stats())))
        place = f"step {fact['step']}/{self.loop.course.num_steps}"
        self.say(f"{self.loop.job.scheme}: {place}, {measure.noun} {measure.text(fact[measure.name])}{more}")
