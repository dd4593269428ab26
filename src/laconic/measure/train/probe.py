"""What schemes cost in steps on a job itself: short runs from one beginning, bf16's beside each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from laconic.measure.losses import smoothed, steps_to
from laconic.measure.train.job import Job
from laconic.planning import Candidate, Penalty, Plan, answer, candidate

Losses = list[tuple[float, float]]  # (step, validation loss), steps in micro-batches
LEAST_STEPS = 24  # two between evaluations
_EVALUATIONS = 12
_PROBED = 3  # candidates beside bf16
_JUDGED = 3  # lowest losses, whose factors lie apart by what chance does


def probe(job: Job, found: Plan, num_steps: int, train: Callable[[Job], Losses]) -> Plan:
    """The plan again, with the steps factors of its soonest candidates taken from runs of so many steps of this job.

    A call that all workers make; `train` trains a job to its end.
    """
    start = time.perf_counter()
    plain = candidate("bf16")
    # Not gossip, in which nobody waits for all: a worker that is done would count as gone.
    others = [one for row in found.rows if (one := candidate(row.scheme)).scheme.of_what != "models" and one != plain]
    asked = others[:_PROBED]
    losses_of = {one: _trained(job, one, num_steps, train) for one in (plain, *asked)}
    source = f"probed on this job, {num_steps} steps"
    probed = tuple((one, factor_of(losses, losses_of[plain], source)) for one, losses in losses_of.items())
    seconds = found.seconds + time.perf_counter() - start
    return answer(replace(found.measured, probed=probed), steps=found.steps, seconds=seconds)


def _trained(job: Job, asked: Candidate, num_steps: int, train: Callable[[Job], Losses]) -> Losses:
    """The losses of a short run under a candidate, at a constant rate, so that a step does not depend on its length."""
    times = asked.accumulate
    training = job.training
    short = replace(
        job,
        scheme=str(asked.scheme),
        steps=math.ceil(num_steps / times),
        batch=times * training.batch,
        accumulate=times * job.accumulate,
        # AdamW bears a rate that grows with the root of the batch.
        lr=training.lr * (times**0.5 if training.optimizer == "adamw" else 1.0),
        schedule="constant",
        warmup=max(1, num_steps // 10 // times),
        eval_every=max(1, num_steps // _EVALUATIONS // times),
    )
    return [(times * step, loss if math.isfinite(loss) else math.inf) for step, loss in train(short)]


def factor_of(losses: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]], source: str) -> Penalty:
    """Steps to a loss over those of bf16 to the same one, for the last three new lowest: median, least and most.

    Where bf16 has not come as far, 1; losses that go up and down are compared by where they were lowest.
    """
    lowest: Losses = []
    for steps, loss in smoothed(losses):
        if not lowest or loss < lowest[-1][1]:
            lowest.append((steps, loss))
    found = []
    for steps, loss in lowest[-_JUDGED:]:
        steps_of_plain = steps_to(loss, plain)
        found.append(1.0 if steps_of_plain is None else steps / steps_of_plain)
    if not found or math.isinf(losses[-1][1]):  # it diverged
        found = [math.inf]
    return Penalty(max(1.0, statistics.median(found)), min(found), max(found), source)
