"""One worker's part in a job, whatever carries its gradients: model, optimizer, and the examples of each step."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.errors import TaskError
from laconic.measure.tasks import TASKS, Data
from laconic.measure.tasks.task import shard
from laconic.measure.train.job import Job
from laconic.measure.train.optimizer import Updater

_WARM_UP_SHARE = 0.05
_EVAL_BATCH = 100
_CPU = torch.device("cpu")


class Course:
    """What rank `rank` of `num_workers` trains on, and how; nothing in it talks to the others."""

    def __init__(self, job: Job, data: Data, rank: int, num_workers: int) -> None:
        self._job = job
        self.rank = rank
        self.data = data
        self.num_workers = num_workers
        self.flips = rank >= num_workers - job.flipped  # whether this worker sends gradients with the wrong sign
        self.batch = job.training.batch
        self._mine = shard(data.train_targets, rank, num_workers, job.labels_per_worker, job.seed)
        if self.batch > len(self._mine):
            raise TaskError(f"a worker has {len(self._mine)} examples; give --batch {len(self._mine)} or less")
        self.num_steps = job.num_steps(len(data.train_targets), num_workers)
        self._shuffled = (-1, self._mine)  # the number of a walk over them, and their order in it

    def model(self, device: torch.device) -> nn.Module:
        """The task's model, drawn from torch's own generator."""
        model = TASKS[self._job.task].model(self._job.model).make(self.data).to(device)
        # Channels last makes the convolutions here two to three times faster on a CPU.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def updater(self, model: nn.Module) -> Updater:
        """The job's optimizer over the model's parameters."""
        return Updater(model, self._job.training)

    def rate(self, step: int) -> float:
        """The learning rate of a step over its peak: a linear warm-up, then a cosine down to zero."""
        warm_up = self._job.warmup
        if warm_up is None:
            warm_up = max(1, round(_WARM_UP_SHARE * self.num_steps))
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self.num_steps - warm_up)))

    def examples(self, step: int, device: torch.device = _CPU) -> tuple[Tensor, Tensor]:
        """This worker's inputs and targets at a step: a walk over its share, shuffled anew each time round.

        Inputs go to the device as they are stored, and are prepared there: for 32 images a CPU takes a millisecond.
        """
        batches_per_round = max(1, len(self._mine) // self.batch)
        turn, place = divmod(step, batches_per_round)
        if self._shuffled[0] != turn:
            shuffle = _generator(self._job.seed, self.rank, turn)
            self._shuffled = turn, self._mine[torch.randperm(len(self._mine), generator=shuffle)]
        chosen = self._shuffled[1][place * self.batch :][: self.batch]
        inputs = self.data.prepare(self.data.train_inputs.index_select(0, chosen).to(device))
        if self.data.augment is not None:
            inputs = self.data.augment(inputs, _generator(self._job.seed, self.rank, step, 1))
        return inputs, self.data.train_targets.index_select(0, chosen).to(device)

    def backward_(self, net: nn.Module, step: int, device: torch.device) -> Tensor:
        """The backward pass of a step, into the gradients of what `net` trains; the loss."""
        inputs, targets = self.examples(step, device)
        loss = loss_of(net(inputs), targets)
        (-loss if self.flips else loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, over the places of a sequence too."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def score(model: nn.Module, data: Data, device: torch.device, place: int = 0, num_places: int = 1) -> list[float]:
    """[right answers, summed loss, answers] on the test data, or on one of several equal parts of it."""
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for start in range(place * _EVAL_BATCH, len(data.test_targets), num_places * _EVAL_BATCH):
        part = slice(start, start + _EVAL_BATCH)
        targets = data.test_targets[part].to(device)
        logits = model(data.prepare(data.test_inputs[part].to(device)))
        right = (logits.argmax(-1) == targets).sum()
        sums += torch.tensor([float(right), float(loss_of(logits, targets)) * targets.numel(), targets.numel()])
    model.train()
    return sums.tolist()


def _generator(*numbers: int) -> torch.Generator:
    """A generator of its own for each tuple of numbers."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
