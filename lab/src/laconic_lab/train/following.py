"""Training without DDP: every worker's model is its own, and what is reported is their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.replicas import Follower, consensus, gather, server_stats
from laconic.session import Stats
from laconic_lab.train.course import Course
from laconic_lab.train.job import Job
from laconic_lab.train.loop import Learner
from laconic_lab.train.measurement import Spent, measured
from laconic_lab.train.worker_group import EndFacts, WorkerGroup

Followed = Callable[[nn.Module, torch.optim.Optimizer], Follower]  # makes a model follow the others


class FollowingWorkers(WorkerGroup):
    """Workers some of whom may die, as their last meeting found them; buffers travel with their models."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.place = follower.rank
        self.num_living = follower.num_workers

    def gather(self, own: Sequence[float]) -> list[list[float]]:
        rows = gather(self._follower, [self._follower.rank, *own])
        alive = [int(row[0]) for row in rows]
        self.place = alive.index(self._follower.rank)
        self.num_living = len(alive)
        return [row[1:] for row in rows]

    def end_facts(self) -> EndFacts:
        servers = server_stats(self._follower)
        lost = {str(rank): why for rank, why in self._follower.stats().lost.items()}
        return EndFacts(servers, servers[0]["lost"] if servers else lost)


class FollowingLearner(Learner):
    """A model that follows its peers; no call after the first needs a worker that has died."""

    owns_model: ClassVar[bool] = True
    session: Follower

    def __init__(self, job: Job, course: Course, device: torch.device, model: nn.Module, followed: Followed) -> None:
        self.course = course
        self._measure = job.measure
        self._device = device
        self.model = model
        self.updater = course.updater(model)
        self.session = followed(model, self.updater.optimizer)
        self.group = FollowingWorkers(self.session)
        self._before_average: dict[str, float] = {}

    def stats(self, *, ages: bool = False) -> Stats:
        return self.session.stats()

    def learn_(self, step: int) -> float:
        self.updater.optimizer.zero_grad()
        loss = self.course.backward_(self.model, self.updater, step, self._device)
        self.updater.apply_()
        self.session.step()
        return float(loss)  # on CUDA this waits for the step to end

    def finish_(self) -> Spent:
        """One global average; how far apart and how good the replicas were is noted before."""
        self._before_average = self._replicas(consensus(self.session)[1])
        with measured() as spent:
            self.session.average_()
        return spent

    def _replicas(self, distance: float) -> dict[str, float]:
        """The accuracy or loss of the worst replica, and the root mean square of their distances to the mean."""
        right, loss, count = self.course.score(self.model, self._device)
        worth = {"accuracy": right / count, "loss": loss / count}[self._measure.name]
        rows = self.group.gather([worth, distance])
        apart = math.sqrt(sum(distance**2 for _, distance in rows) / len(rows))
        worst = self._measure.worst([worth for worth, _ in rows])
        return {f"worst_{self._measure.name}": worst, "consensus_distance": apart}

    @torch.no_grad()
    def score(self, *, is_last: bool) -> tuple[list[float], dict[str, Any]]:
        """Score the mean of all models, of whose test each does a part, and each replica.

        After the last average all replicas are equal: then they are told as they were before it.
        """
        mean, distance = consensus(self.session)
        replicas = self._before_average if is_last else self._replicas(distance)
        own = self.session.vector.read()
        self.session.vector.write_(mean)
        rows: list[list[float]] = []
        while not sum(row[2] for row in rows):  # again where whoever had all of a small test has died meanwhile
            self.group.gather([])  # who is there for a part of the test
            rows = self.group.gather(
                self.course.score(self.model, self._device, self.group.place, self.group.num_living)
            )
        self.session.vector.write_(own)
        return [sum(column) for column in zip(*rows, strict=True)], {**replicas, "alive": len(rows)}
