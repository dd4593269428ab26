"""A job's workers as threads of one process, around one model: what they would send is studied without sending it."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic.errors import SchemeError
from laconic.layout import Bucket, Layout
from laconic.measure.records import Recorder
from laconic.measure.tasks import TASKS
from laconic.measure.train.course import Course, loss_of, score
from laconic.measure.train.facts import median_times, step_fact
from laconic.measure.train.job import Job
from laconic.measure.train.result import DIVERGED, Result
from laconic.recipes import parse
from laconic.scheme import Scheme
from laconic.session import Session, Stats
from laconic.transport import InProcess, in_process

Watch = Callable[[int, Session], None]  # called by worker 0 after each step, counted from 1


def work_in_process(
    job: Job, tell: Callable[[Result], None], say: Callable[[str], None], watch: Watch | None = None
) -> int:
    """Train and measure; 0, or DIVERGED.

    Replicas are equal bit for bit, so one model stands for all of them: the workers take turns with it, each for its
    own batch, exchange what they found as one bucket, and the first applies it. Times are of all of them together.
    """
    scheme = parse(job.scheme)
    if not isinstance(scheme, Scheme):
        raise SchemeError(f"{scheme} lives inside PyTorch's DDP; leave --in-process out, or give another scheme")
    data = TASKS[job.task].load(job.data)
    torch.manual_seed(job.seed)
    shop = _Shop(job, Course(job, data, 0, job.workers))

    def work(transport: InProcess) -> Stats:
        session = Session(scheme, transport)
        shop.work(Course(job, data, transport.rank, transport.num_workers), session, transport.rank, say, watch)
        return session.stats(ages=True)

    with Recorder(job.out) as shop.records:
        shop.records.write("job", **job.facts(), workers_seen=job.workers, first_step=0)
        result = _result(shop, in_process(job.workers, work, num_servers=job.servers))
        shop.records.write("result", **result.as_dict())
    tell(result)
    return 0 if result.diverged_at is None else DIVERGED


class _Shop:
    """The one model, its optimizer, and who may touch it."""

    def __init__(self, job: Job, course: Course) -> None:
        self.job, self.course = job, course
        self.model = course.model(torch.device("cpu"))
        self.optimizer = course.optimizer(self.model)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.layout = Layout.of(list(self.trained), [p.shape for p in self.trained.values()])
        self.records = Recorder(None)
        self.facts: list[dict[str, Any]] = []
        self.evaluation: dict[str, Any] = {}
        self.seconds = 0.0
        self.diverged_at: int | None = None
        self._turn = threading.Lock()
        self._losses: list[float] = []

    def work(
        self, course: Course, session: Session, rank: int, say: Callable[[str], None], watch: Watch | None
    ) -> None:
        """One worker's steps; worker 0 also applies, evaluates and records."""
        leads, everyone = rank == 0, session.transport
        if leads:
            self._evaluate(0, session, say)
        for step in range(course.num_steps):
            start, before = time.perf_counter(), session.stats() if leads else None
            flat = self._gradient(course, step)
            if rank >= self.job.workers - self.job.flipped:
                flat.neg_()
            session.exchange_(Bucket(0, self.layout, flat, is_last=True))
            if leads and before is not None:
                self._apply(flat, step)
                self._record(step + 1, time.perf_counter() - start, before, session.stats())
                if (step + 1) % self.job.eval_every == 0 or step + 1 == course.num_steps:
                    self._evaluate(step + 1, session, say)
                if watch is not None:
                    watch(step + 1, session)
            everyone.broadcast(torch.empty(0, dtype=torch.uint8), 0)  # none computes on while the first applies
            if self.diverged_at is not None:
                return

    def _gradient(self, course: Course, step: int) -> Tensor:
        inputs, targets = course.examples(step)
        with self._turn:
            loss = loss_of(self.model(inputs), targets)
            found = torch.autograd.grad(loss, list(self.trained.values()), allow_unused=True)
            self._losses.append(float(loss.detach()))
        pairs = zip(found, self.trained.values(), strict=True)
        return torch.cat([torch.zeros(p.numel()) if g is None else g.reshape(-1) for g, p in pairs])

    def _apply(self, flat: Tensor, step: int) -> None:
        self.course.set_rate_(self.optimizer, step)
        for parameter, span in zip(self.trained.values(), self.layout.spans, strict=True):
            parameter.grad = flat[span.start : span.stop].view_as(parameter)
        self.optimizer.step()

    def _record(self, step: int, seconds: float, before: Stats, after: Stats) -> None:
        self.seconds += seconds
        loss, self._losses = statistics.fmean(self._losses), []
        fact = step_fact(step, loss, seconds, before, after)
        self.facts.append(fact)
        self.records.write("step", **fact)

    def _evaluate(self, step: int, session: Session, say: Callable[[str], None]) -> None:
        right, loss, count = score(self.model, self.course.data, torch.device("cpu"))
        if not math.isfinite(loss) and step:
            self.diverged_at = step
        stats = session.stats()
        self.evaluation = {
            "step": step,
            "seconds": self.seconds,
            "accuracy": right / count,
            "loss": loss / count,
            "bytes_out": stats.bytes_out,
            "bytes_in": stats.bytes_in,
        }
        self.records.write("eval", **self.evaluation)
        union = f", |U|/k {stats.union:.2f}" if stats.union else ""
        say(f"{self.job.scheme}: step {step}/{self.course.num_steps}, accuracy {100 * right / count:.2f} %{union}")


def _result(shop: _Shop, everyone: list[Stats]) -> Result:
    """Bytes are means over the workers; a server's are those that all of them heard."""
    out, into, dense = (
        round(statistics.fmean(getattr(stats, name) for stats in everyone))
        for name in ("bytes_out", "bytes_in", "dense_bytes_out")
    )
    step_ms, split_ms = median_times(shop.facts)
    return Result(
        scheme=everyone[0].scheme,
        accuracy=shop.evaluation["accuracy"],
        loss=shop.evaluation["loss"],
        steps=everyone[0].steps,
        seconds=shop.seconds,
        step_ms=step_ms,
        split_ms=split_ms,
        bytes_out=out,
        bytes_in=into,
        link_bytes_out=None,
        link_bytes_in=None,
        ratio=dense / out if out else None,
        skipped_steps=everyone[0].skipped_steps,
        diverged_at=shop.diverged_at,
        union=everyone[0].union,
        oldest_residual=everyone[0].oldest_residual,
        never_sent=everyone[0].never_sent,
        server_bytes_out=sum(stats.bytes_in for stats in everyone) if shop.job.asks_servers else None,
    )
