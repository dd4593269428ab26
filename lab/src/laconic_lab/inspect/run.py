"""A real training run in one process, looked at layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.errors import SchemeError
from laconic.layout import Bucket, Layout
from laconic.recipes import parse
from laconic.scheme import Scheme
from laconic.session import Session
from laconic_lab.errors import TaskError
from laconic_lab.inspect.fit import Fit, fit, tail
from laconic_lab.train.job import Job
from laconic_lab.train.loop import TrainingLoop
from laconic_lab.train.virtual import run_virtual

GRADIENT = "gradient"
BALANCE = "balance"


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


def inspect(job: Job, at: Sequence[int], rho: float, say: Callable[[str], None] = lambda line: None) -> list[Look]:
    """Train job.workers virtual workers and look at worker 0 in the steps `at`, counted from 1.

    A step is that of `laconic train`, but for the whole model being one bucket. The run ends with the last look.
    """
    _check(job, rho)
    data = job.load_data()
    num_steps = job.num_steps(len(data.train_targets), job.workers)
    outside = [step for step in at if not 1 <= step <= num_steps]
    if outside or not at:
        given = f"step {outside[0]} is not one of the run's" if outside else "no step is given to look at"
        raise TaskError(f"{given}; give --at steps from 1 to {num_steps}, as in --at 1,{num_steps}")
    last = max(at)
    looks: list[Look] = []

    def on_gradient(step: int, bucket: Bucket, session: Session) -> None:
        if step in at:
            looks.extend(_look(step, session, bucket.layout, bucket.flat, rho))

    def train(loop: TrainingLoop) -> None:
        while loop.steps_done < last:
            fact = loop.step_()
            step = fact["step"]
            if loop.group.place == 0 and (step in at or step % max(1, last // 10) == 0):
                say(f"step {step}/{num_steps}, loss {fact['loss']:.3f}")

    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_threads // job.workers))  # for each worker, which is a thread itself
    try:
        run_virtual(job, data, train, shares_model=False, on_gradient=on_gradient)
    finally:
        torch.set_num_threads(num_threads)
    return looks


def _check(job: Job, rho: float) -> None:
    if not 0 < rho <= 1:
        raise TaskError(f"--rho is {rho}; give a share in (0, 1]")
    scheme = parse(job.scheme)
    if job.follows:
        raise SchemeError(f"{scheme} exchanges models, and inspect looks at gradients; use topk:rho={rho}")
    if not isinstance(scheme, Scheme):
        raise SchemeError(f"{scheme} keeps its state inside PyTorch, where inspect cannot look; use topk:rho={rho}")


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
    """The values that the selector will rank in this step, from a copy of the accounts."""
    memory = session.scheme.memory
    if not memory.kinds:
        return None
    kept = session.state_dict()["memory"]
    account = memory.open(
        [
            torch.cat([kept[kind].get(span.name, torch.zeros(span.num_entries)) for span in layout.spans])
            for kind in memory.kinds
        ]
    )
    account.deposit_(gradient, 1.0)
    return account.balance
