"""A job's workers as threads of one process: what they would send is studied without sending it."""

from __future__ import annotations

import copy
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from laconic.errors import SchemeError
from laconic.layout import Bucket, Layout
from laconic.recipes import parse
from laconic.replicas import Follower, policy_for
from laconic.scheme import GossipScheme, OuterScheme, Scheme
from laconic.session import Session
from laconic.testing import InProcess, in_process
from laconic_lab.tasks import Data
from laconic_lab.train.course import Course
from laconic_lab.train.following import FollowingLearner
from laconic_lab.train.job import Job
from laconic_lab.train.loop import Learner, TrainingLoop
from laconic_lab.train.result import DIVERGED, Result
from laconic_lab.train.worker import device_of, run_logged
from laconic_lab.train.worker_group import EndFacts, WorkerGroup

T = TypeVar("T")
Say = Callable[[str], None]
OnGradient = Callable[[int, Bucket, Session], None]  # called by a worker before it exchanges, with its own gradient


def work_in_process(job: Job, tell: Callable[[Result], None], say: Say) -> int:
    """Train and measure; 0, or DIVERGED.

    Replicas are equal bit for bit, so one model stands for all of them: the workers take turns with it, each for its
    own batch, exchange what they found as one bucket, and the first applies it. Times are of all of them together.
    """
    data = job.load_data()
    result = run_virtual(job, data, partial(run_logged, saves=False, say=say), shares_model=True)[0]
    tell(result)
    return 0 if result.diverged_at is None else DIVERGED


def run_virtual(
    job: Job,
    data: Data,
    train: Callable[[TrainingLoop], T],
    *,
    shares_model: bool,
    on_gradient: OnGradient | None = None,
) -> list[T]:
    """train() for each of job.workers virtual workers, around one model or with a copy each; results by rank.

    Workers that train alone and agree now and then have a copy each in any case. `on_gradient` is called by the first
    worker alone. Ctrl-C ends them all between two steps: an interrupted join of the workers themselves would leave
    them computing while the interpreter goes away.
    """
    scheme = parse(job.scheme)
    if not isinstance(scheme, Scheme | OuterScheme | GossipScheme):
        raise SchemeError(f"{scheme} lives inside PyTorch's DDP; leave --in-process out, or give another scheme")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        first = Replica(Course(job, data, 0, job.workers), device_of(job))
    rows: list[list[float]] = [[] for _ in range(job.workers)]
    interrupted = threading.Event()

    def work(transport: InProcess) -> T:
        leads = transport.rank == 0
        course = Course(job, data, transport.rank, transport.num_workers)
        learner: Learner
        if isinstance(scheme, Scheme):
            replica = first if shares_model or leads else first.copy(course)
            group = VirtualWorkers(transport, rows, has_servers=job.asks_servers)
            session = Session(scheme, transport, loss_scale=replica.loss_scale)
            applies = leads or not shares_model
            learner = VirtualLearner(course, replica, session, group, applies, on_gradient if leads else None)
        else:
            options = {"in_background": False} if isinstance(scheme, OuterScheme) else {}
            learner = FollowingLearner(
                *(job, course, first.device, copy.deepcopy(first.model)),
                lambda model, optimizer: Follower(policy_for(model, optimizer, scheme, transport, **options)),
            )
        return train(TrainingLoop(job, course, learner, learner.group, interrupted))

    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(in_process, job.workers, work, num_servers=job.servers)
        try:
            return results.result()
        except KeyboardInterrupt:
            interrupted.set()
            raise


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

    @property
    def loss_scale(self) -> Callable[[], float] | None:
        """The scale of the loss, where it is scaled."""
        return self.updater.grad_scaler.get_scale if self.updater.grad_scaler else None

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
class VirtualLearner(Learner):
    """A worker in a thread: it exchanges its gradient of a replica, and applies the answer if that is its part."""

    course: Course
    replica: Replica
    session: Session
    group: VirtualWorkers
    applies: bool
    on_gradient: OnGradient | None

    def __post_init__(self) -> None:
        self.model = self.replica.model
        self.updater = self.replica.updater

    def learn_(self, step: int) -> float:
        flat, loss = self.replica.gradient(self.course, step)
        bucket = Bucket(0, self.replica.layout, flat, is_last=True)
        if self.on_gradient is not None:
            self.on_gradient(step + 1, bucket, self.session)
        self.session.exchange_(bucket)
        if self.applies:
            loss = self.replica.apply_(flat, finite=self.session.last_step_finite)
        self.group.wait()  # none computes on while another applies
        return loss

    def score(self, *, is_last: bool) -> tuple[list[float], dict[str, Any]]:
        """The first scores all of the test data; the others wait."""
        own = [0.0, 0.0, 0.0]
        if self.group.place == 0:
            own = self.course.score(self.model, self.replica.device)
        sums = self.group.total(torch.tensor(own, dtype=torch.float64)).tolist()
        return sums, {"bytes_in": self.session.stats().bytes_in}
