"""A worker's lines on stderr, where its launcher shows no bars."""

from __future__ import annotations

import os
import sys
from typing import Any

from laconic_lab.train.loop import TrainingLoop
from laconic_lab.train.result import beside_dense

WATCHED = "LACONIC_WATCHED"  # set where the launcher shows the run


def show(loop: TrainingLoop, fact: dict[str, Any]) -> None:
    """Print how a run goes after an evaluation, unless its launcher shows that."""
    if WATCHED in os.environ:
        return
    measure = loop.job.measure
    last = f", {_last_step(loop)}" if loop.facts else ""
    place = f"step {fact['step']}/{loop.course.num_steps}"
    text = f"{loop.job.scheme}: {place}, {measure.noun} {measure.text(fact[measure.name])}{last}"
    print(text, file=sys.stderr, flush=True)


def _last_step(loop: TrainingLoop) -> str:
    fact = loop.facts[-1]
    beside = beside_dense(loop.learner.stats().ratio)
    sent = f"{fact['bytes_out']:,} bytes out" + (f" ({beside} so far)" if beside else "")
    rate = loop.tokens_per_s(fact["ms"])
    seen = f", {rate:,.0f} tokens/s" if rate else ""
    return f"train loss {fact['loss']:.3f}, {fact['ms']:.0f} ms{seen}, {sent}"
