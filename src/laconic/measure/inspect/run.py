"""A real training run in one process, looked at layer by layer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from laconic.errors import SchemeError, TaskError
from laconic.layout import Bucket, Layout
from laconic.measure.inspect.fit import Fit, fit
from laconic.measure.inspect.tail import tail
from laconic.measure.tasks import TASKS
from laconic.measure.train.course import Course, loss_of
from laconic.measure.train.job import Job
from laconic.recipes import parse
from laconic.scheme import Scheme
from laconic.session import Session
from laconic.transport import InProcess, in_process

T = TypeVar("T")

GRADIENT, BALANCE = "gradient", "balance"


@dataclass(frozen=True, kw_only=True)
class Look:
    """One tensor at one step; `layer` is a parameter's name, or None for the whole model as one vector."""

    step: int
    of: str  # GRADIENT: this worker's own; BALANCE: what memory owes plus the gradient, which a selector ranks
    layer: str | None
    fit: Fit
    tail: list[tuple[float, float]]

    def as_dict(self) -> dict[str, Any]:
        """The look without its tail, as plain values."""
        return {"step": self.step, "of": self.of, "layer": self.layer, **self.fit.as_dict()}


@dataclass(frozen=True)
class _Watch:
    """When to look, and for what; the event ends all workers."""

    at: frozenset[int]
    rho: float
    say: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)


def inspect(job: Job, at: Sequence[int], rho: float, say: Callable[[str], None] = lambda said: None) -> list[Look]:
    """Train job.workers virtual workers and look at worker 0 in the steps `at`, counted from 1.

    A step is that of `laconic train`, but for the whole model being one bucket. The run ends with the last look.
    """
    scheme = _checked(job, rho)
    data = TASKS[job.task].load(job.data)
    first = Course(job, data, 0, job.workers)
    strange = [step for step in at if not 1 <= step <= first.num_steps]
    if strange or not at:
        given = f"step {strange[0]} is not one of the run's" if strange else "no step is given to look at"
        raise TaskError(f"{given}; give --at steps from 1 to {first.num_steps}, as in --at 1,{first.num_steps}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model = first.model(torch.device("cpu"))
    watch, num_threads = _Watch(frozenset(at), rho, say), torch.get_num_threads()

    def work(transport: InProcess) -> list[Look]:
        course = Course(job, data, transport.rank, transport.num_workers)
        return _train(course, copy.deepcopy(model), Session(scheme, transport), watch)

    torch.set_num_threads(max(1, num_threads // job.workers))  # for each worker, which is a thread itself
    try:
        return _interruptible(lambda: in_process(job.workers, work)[0], watch.stop)
    finally:
        torch.set_num_threads(num_threads)


def _interruptible(work: Callable[[], T], stop: threading.Event) -> T:
    """work() in a thread of its own; Ctrl-C sets `stop` and waits for its end.

    An interrupted join of the workers themselves would leave them computing while the interpreter goes away.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            stop.set()
            raise


def _checked(job: Job, rho: float) -> Scheme:
    if not 0 < rho <= 1:
        raise TaskError(f"--rho is {rho}; give a share in (0, 1]")
    scheme = parse(job.scheme)
    if scheme.of_what == "models":
        raise SchemeError(f"{scheme} exchanges models, and inspect looks at gradients; use topk:rho={rho}")
    if not isinstance(scheme, Scheme):
        raise SchemeError(f"{scheme} keeps its state inside PyTorch, where inspect cannot look; use topk:rho={rho}")
    return scheme


def _train(course: Course, model: nn.Module, session: Session, watch: _Watch) -> list[Look]:
    """One worker's steps; worker 0 returns what it saw."""
    optimizer, last, leads = course.optimizer(model), max(watch.at), session.transport.rank == 0
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    layout = Layout.of(list(trained), [parameter.shape for parameter in trained.values()])
    looks: list[Look] = []
    for step in range(1, last + 1):
        if watch.stop.is_set():
            raise KeyboardInterrupt
        course.set_rate_(optimizer, step - 1)
        inputs, targets = course.examples(step - 1)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        flat = torch.cat([_gradient(parameter) for parameter in trained.values()])
        if leads and step in watch.at:
            looks += _look(step, session, layout, flat, watch.rho)
        if leads and (step in watch.at or step % max(1, last // 10) == 0):
            watch.say(f"step {step}/{course.num_steps}, loss {float(loss.detach()):.3f}")
        session.exchange_(Bucket(0, layout, flat, is_last=True))
        for parameter, span in zip(trained.values(), layout.spans, strict=True):
            parameter.grad = flat[span.start : span.stop].view_as(parameter)
        optimizer.step()
    return looks


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)


def _look(step: int, session: Session, layout: Layout, gradient: Tensor, rho: float) -> list[Look]:
    """Each parameter, then the whole model: the gradient, and the balance where anything is kept."""
    looks = []
    for of, flat in ((GRADIENT, gradient), (BALANCE, _balance(session, layout, gradient))):
        if flat is None:
            continue
        parts: list[tuple[str | None, Tensor]] = [(span.name, flat[span.start : span.stop]) for span in layout.spans]
        for layer, x in [*parts, (None, flat)]:
            looks.append(Look(step=step, of=of, layer=layer, fit=fit(x, rho), tail=tail(x)))
    return looks


def _balance(session: Session, layout: Layout, gradient: Tensor) -> Tensor | None:
    """What the selector will rank in this step, from a copy of the accounts."""
    memory, kept = session.scheme.memory, session.state_dict()["memory"]
    if not memory.kinds:
        return None
    account = memory.open(
        [
            torch.cat([kept[kind].get(span.name, torch.zeros(span.num_entries)) for span in layout.spans])
            for kind in memory.kinds
        ]
    )
    account.deposit_(gradient, 1.0)
    return account.balance
