"""Small models that gossip, with learning real or frozen."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from laconic import Follower, GossipScheme, OuterScheme, parse
from laconic.replicas import policy_for
from laconic.transport import InProcess, in_process
from tests.local_mailbox import LocalMailbox, local_mailboxes
from tests.parts import gossip_texts
from tests.virtual import one_core

MATCHED_TEXTS = [text for text in gossip_texts() if "mode=matched" in text]
FREE_TEXTS = [text for text in gossip_texts() if "mode=matched" not in text]

_drawing = threading.Lock()


class Small(nn.Module):
    """Tensors of very different sizes, and a normalisation whose buffers must travel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(30, 40)
        self.norm = nn.BatchNorm1d(40)
        self.head = nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.body(x))))  # type: ignore[no-any-return]


class Learner:
    """A model that follows, on data of its own."""

    def __init__(
        self,
        scheme: str,
        rank: int,
        follow: Callable[[nn.Module, torch.optim.Optimizer, Any], Any],
        lr: float,
    ) -> None:
        with _drawing, torch.random.fork_rng(devices=[]):  # one generator for all threads
            torch.manual_seed(3)
            self.model = Small()
        self.rank = rank
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.5)
        self.follower = follow(self.model, self.optimizer, parse(scheme))

    def drift(self, number: int) -> None:
        """A step in a random direction instead of a gradient's: the same bits on any number of threads."""
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.01)
        self.follower.step()

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        y = torch.randint(5, (16,), generator=generator)
        x = torch.randn(16, 30, generator=generator)
        x[torch.arange(16), y] += 3
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.follower.step()
        return float(loss.detach())


def followed(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheme: GossipScheme | OuterScheme, transport: InProcess
) -> Follower:
    """What makes a model follow virtual others, in step."""
    return Follower(policy_for(model, optimizer, scheme, transport, in_background=False))


def matched(
    scheme: str, num_workers: int, steps: int, *, first: int = 0, load: list[dict[str, Any]] | None = None
) -> list[tuple[Learner, list[float]]]:
    """Virtual workers in step; (learner, losses) of each, after `steps` from step `first` on."""

    def work(transport: InProcess) -> tuple[Learner, list[float]]:
        learner = Learner(scheme, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        if load is not None:
            learner.model.load_state_dict(load[transport.rank]["model"])
            learner.optimizer.load_state_dict(load[transport.rank]["optimizer"])
            learner.follower.load_state_dict([state["follower"] for state in load])
        return learner, [learner.step(first + number) for number in range(steps)]

    with one_core():
        return in_process(num_workers, work)


def drifted(scheme: str, num_workers: int, steps: int) -> list[Learner]:
    """Virtual workers in step that drift."""

    def work(transport: InProcess) -> Learner:
        learner = Learner(scheme, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        for number in range(steps):
            learner.drift(number)
        return learner

    with one_core():
        return in_process(num_workers, work)


def free(
    scheme: str, num_workers: int, work: Callable[[Learner], None], lr: float, longest_delay_s: float = 0.002
) -> list[Learner]:
    """Virtual workers without a barrier, each in a thread, whose messages take a random time each way."""
    chance = random.Random(5)
    boxes = local_mailboxes(num_workers, lambda: time.sleep(chance.random() * longest_delay_s))
    learners = [learner_at(box, scheme, lr) for box in boxes]
    with ThreadPoolExecutor(num_workers) as pool:
        for done in [pool.submit(work, learner) for learner in learners]:
            done.result()
    return learners


def learner_at(box: LocalMailbox, scheme: str, lr: float) -> Learner:
    return Learner(scheme, box.rank, lambda m, o, s: Follower(policy_for(m, o, s, box)), lr)


def vectors_of(learners: list[Learner]) -> Tensor:
    return torch.stack([learner.follower.vector.read() for learner in learners])
