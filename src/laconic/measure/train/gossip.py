"""Training without DDP: every worker's model is its own, and what is reported is their mean."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.gossip import Follower, follow
from laconic.measure.tasks import Data
from laconic.measure.train.council import Council
from laconic.measure.train.interface import interface_bytes
from laconic.measure.train.job import Job
from laconic.measure.train.trainer import Trainer
from laconic.scheme import AnyScheme


def trainer_for(job: Job, data: Data, device: torch.device) -> Trainer:
    """The trainer that a job's scheme asks for."""
    return GossipTrainer(job, data, device) if job.is_gossip else Trainer(job, data, device)


class FollowersCouncil:
    """Workers some of whom may die, as their last meeting found them."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.place, self.num_living = follower.rank, follower.num_workers

    def total(self, tensor: Tensor) -> Tensor:
        rows = self.gather(tensor.flatten().tolist())
        return torch.tensor(rows, dtype=torch.float64).sum(0).to(tensor.dtype).view(tensor.shape)

    def gather(self, mine: Sequence[float]) -> list[list[float]]:
        rows = self._follower.gather([self._follower.rank, *mine])
        alive = [int(row[0]) for row in rows]
        self.place, self.num_living = alive.index(self._follower.rank), len(alive)
        return [row[1:] for row in rows]

    def share_(self, buffers: Iterable[Tensor]) -> None:
        """Buffers travel with the models."""

    def server_facts(self) -> list[dict[str, Any]]:
        return []


class GossipTrainer(Trainer):
    """A model that follows its peers; no call after the first needs a worker that has died."""

    is_alone: ClassVar[bool] = True

    session: Follower

    def _join(self, scheme: AnyScheme) -> tuple[nn.Module, Follower, Council]:
        follower = follow(self.model, self.optimizer, scheme, group=self._workers())
        return self.model, follower, FollowersCouncil(follower)

    def _stepped(self) -> None:
        self.session.step()

    def resume(self) -> int:
        """The same, and nobody is asked about a model that is still to be loaded."""
        step = super().resume()
        self.council.gather([])
        return step

    def finish(self) -> None:
        """One global average; how far apart and how good the replicas were is noted before."""
        self._before_average = self._replicas(self.session.consensus()[1])
        seen_before, start = interface_bytes(), time.perf_counter()
        self.session.average_()
        self.seconds += time.perf_counter() - start
        seen_after = interface_bytes()
        if seen_before is not None and seen_after is not None and self.facts:
            for way, a, b in zip(("out", "in"), seen_after, seen_before, strict=True):
                self.facts[-1][f"link_bytes_{way}"] += a - b

    def _replicas(self, distance: float) -> dict[str, float]:
        """The accuracy of the worst replica, and the root mean square of their distances to the mean."""
        right, _, count = self.score(0, 1)
        rows = self.council.gather([right / count, distance])
        apart = math.sqrt(sum(distance**2 for _, distance in rows) / len(rows))
        return {"worst_accuracy": min(accuracy for accuracy, _ in rows), "consensus_distance": apart}

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Score the mean of all models, of whose test each does a part, and each replica; all get the same figures.

        After the last average all replicas are equal: then they are told as they were before it.
        """
        mean, distance = self.session.consensus()
        is_last = self.steps_done == self.num_steps
        replicas = self._before_average if is_last else self._replicas(distance)
        own = self.session.read()
        self.session.write_(mean)
        self.council.gather([])  # who is there for a part of the test
        shared = self.score(self.council.place, self.council.num_living)
        self.session.write_(own)
        rows = self.council.gather(shared)
        sums = [sum(column) for column in zip(*rows, strict=True)]
        return self._evaluated(*sums, **replicas, alive=len(rows))
