"""The training loop: what is the same for worker processes, virtual workers and inspection."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from laconic import Attached
from laconic.replicas import Follower
from laconic.session import Session, Stats
from laconic.testing import FAULT_POINTS, fault_point
from laconic_lab.train.course import Course
from laconic_lab.train.job import Job
from laconic_lab.train.measurement import Spent, measured, slowed, step_fact
from laconic_lab.train.optimizer import Updater
from laconic_lab.train.worker_group import WorkerGroup

FAULT_POINTS |= {
    "train.step": "before a step of a job (loop)",
    "train.evaluate": "before an evaluation (loop)",
    "train.average": "after the last step, before models that trained apart are averaged (loop)",
    "train.save": "before a checkpoint is written (loop)",
    "train.resume": "before a checkpoint is looked for (loop)",
    "train.resumed": "after a run was resumed (loop)",
    "train.end": "after the last evaluation (loop)",
}


class Learner(ABC):
    """One worker's model: how it learns from a batch, and how it is judged, by the kind of worker."""

    owns_model: ClassVar[bool] = False  # whether each worker's model and optimizer are its own
    course: Course
    model: nn.Module
    updater: Updater
    session: Session | Attached | Follower
    group: WorkerGroup

    def stats(self, *, ages: bool = False) -> Stats:
        """The session's; with `ages` also how long entries wait, where that is known."""
        return self.session.stats(ages=ages)

    @abstractmethod
    def learn_(self, step: int) -> float:
        """Find the gradient of a step's examples, exchange, apply; the loss."""

    def finish_(self) -> Spent:
        """Do what comes after the last step, on the clock."""
        return Spent()

    @abstractmethod
    def score(self, *, is_last: bool) -> tuple[list[float], dict[str, Any]]:
        """([right answers, summed loss, answers] on the test data, the same for all workers; more to be recorded)."""


class Observer:
    """Receives what is measured of one worker; this one, of a worker that does not lead, notes nothing."""

    def step(self, fact: dict[str, Any]) -> None:
        """After each step."""

    def evaluation(self, fact: dict[str, Any]) -> None:
        """After each evaluation."""


class TrainingLoop:
    """One worker's way through a job, and what it has measured so far; once `interrupted` is set, no step follows."""

    def __init__(
        self,
        job: Job,
        course: Course,
        learner: Learner,
        group: WorkerGroup,
        interrupted: threading.Event | None = None,
    ) -> None:
        self.job = job
        self.course = course
        self.learner = learner
        self.group = group
        self._interrupted = interrupted or threading.Event()
        self.steps_done = 0
        self.seconds = 0.0  # of training; evaluation is not counted
        self.peak_memory_bytes = 0  # that PyTorch allocated on a GPU, of training too
        self.bytes_before = {"out": 0, "in": 0, "dense": 0}  # what the session counted before a resume
        self.facts: list[dict[str, Any]] = []
        self.last_evaluation: dict[str, Any] = {}
        self.diverged_at: int | None = None  # the step from which on the loss was no number
        self.is_saved = True  # whether no worker failed to write the last checkpoint that was due
        self._not_finite_since: int | None = None

    def _is_over(self) -> bool:
        return self.steps_done == self.course.num_steps

    def run_(self, observer: Observer) -> None:
        """Train to the end of the job, or to the evaluation that finds the loss to be no number."""
        if self.steps_done == 0:
            observer.evaluation(self.evaluate())
        while not self._is_over() and self.diverged_at is None:
            observer.step(self.step_())
            if self._is_over():
                fault_point("train.average", self)
                self._spend_(self.learner.finish_())
            if self._is_over() or self.steps_done % self.job.eval_every == 0:
                observer.evaluation(self.evaluate())
        fault_point("train.end", self)

    def step_(self) -> dict[str, Any]:
        """Train on one batch; returns what was measured."""
        fault_point("train.step", self)
        if self._interrupted.is_set():
            raise KeyboardInterrupt
        before = self.learner.stats()
        with measured() as spent, slowed():
            self.learner.updater.set_rate_(self.course.rate(self.steps_done))
            loss = self.learner.learn_(self.steps_done)
        self.seconds += spent.seconds
        self.steps_done += 1
        self._not_finite_since = None if math.isfinite(loss) else self._not_finite_since or self.steps_done
        fact = step_fact(self.steps_done, loss, spent, before, self.learner.stats())
        self.facts.append(fact)
        return fact

    def _spend_(self, spent: Spent) -> None:
        """Book what the last step did not include."""
        self.seconds += spent.seconds
        for name, num_bytes in spent.link_bytes.items():
            self.facts[-1][name] += num_bytes

    def evaluate(self) -> dict[str, Any]:
        """Accuracy and loss on the test data; every worker gets the same figures."""
        fault_point("train.evaluate", self)
        if self.job.device == "cuda":
            self.peak_memory_bytes = max(self.peak_memory_bytes, torch.cuda.max_memory_allocated())
        (right, loss, count), more = self.learner.score(is_last=self._is_over())
        if not math.isfinite(loss) and self.steps_done:  # the sum of all workers, who thus agree to stop
            self.diverged_at = self._not_finite_since or self.steps_done
        self.last_evaluation = {
            "step": self.steps_done,
            "seconds": self.seconds,
            "accuracy": right / count,
            "loss": loss / count,
            "bytes_out": self.bytes_so_far()["out"],
            **more,
        }
        if self.job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # a batch of the test data is larger than one of training
        return self.last_evaluation

    def tokens_per_s(self, step_ms: float) -> float | None:
        """The tokens that all workers together see in a second; None where examples are not made of tokens."""
        context = self.job.training.context
        return None if context is None else 1e3 * context * self.course.batch * self.group.num_living / step_ms

    def bytes_so_far(self) -> dict[str, int]:
        """The bytes that this worker sent and received since the first step, and dense would have sent."""
        stats = self.learner.stats()
        return {
            "out": self.bytes_before["out"] + stats.bytes_out,
            "in": self.bytes_before["in"] + stats.bytes_in,
            "dense": self.bytes_before["dense"] + stats.dense_bytes_out,
        }
