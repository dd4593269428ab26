"""A worker's lines on stderr, where its launcher shows no bars, and TensorBoard on request."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from laconic_lab.errors import TaskError
from laconic_lab.train.job import Job
from laconic_lab.train.loop import TrainingLoop
from laconic_lab.train.result import beside_dense

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


WATCHED = "LACONIC_WATCHED"  # set where the launcher shows the run


class Progress:
    """Shows a run as it goes, unless its launcher does; `shown` is for rank 0."""

    def __init__(self, job: Job, loop: TrainingLoop, *, shown: bool) -> None:
        self._job = job
        self._loop = loop
        self._shown = shown and WATCHED not in os.environ
        self._events = _events(job) if shown and job.tensorboard else None

    def close(self) -> None:
        if self._events:
            self._events.close()

    def step(self, fact: dict[str, Any]) -> None:
        if self._events:
            for name in ("loss", "ms", "bytes_out"):
                self._events.add_scalar(f"train/{name}", fact[name], fact["step"])

    def evaluation(self, fact: dict[str, Any]) -> None:
        if self._events:
            for name in ("accuracy", "loss"):
                self._events.add_scalar(f"test/{name}", fact[name], fact["step"])
        if self._shown:
            measure = self._job.measure
            last = f", {self._text(self._loop.facts[-1])}" if self._loop.facts else ""
            print(
                f"{self._job.scheme}: step {fact['step']}/{self._loop.course.num_steps}, "
                f"{measure.noun} {measure.text(fact[measure.name])}{last}",
                file=sys.stderr,
                flush=True,
            )

    def _text(self, fact: dict[str, Any]) -> str:
        beside = beside_dense(self._loop.learner.stats().ratio)
        sent = f"{fact['bytes_out']:,} bytes out" + (f" ({beside} so far)" if beside else "")
        rate = self._loop.tokens_per_s(fact["ms"])
        seen = f", {rate:,.0f} tokens/s" if rate else ""
        return f"train loss {fact['loss']:.3f}, {fact['ms']:.0f} ms{seen}, {sent}"


def _events(job: Job) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TaskError("--tensorboard needs the tensorboard package; pip install 'laconic[tensorboard]'") from None
    return SummaryWriter(str(job.out))
