"""One worker's part in a job, whatever carries its gradients: model, optimizer, and the examples of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laconic_lab.errors import TaskError
from laconic_lab.tasks import TASKS, Data
from laconic_lab.tasks.task import shard
from laconic_lab.train.job import Job
from laconic_lab.train.optimizer import Updater

_WARM_UP_SHARE = 0.05
_EVAL_BATCH = 100
_AMP_TYPES: dict[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CPU = torch.device("cpu")


class Course:
    """The data, model and schedule of rank `rank` of `num_workers`; nothing in it exchanges anything."""

    def __init__(self, job: Job, data: Data, rank: int, num_workers: int) -> None:
        self._job = job
        self.rank = rank
        self.data = data
        self.num_workers = num_workers
        self.flips = rank >= num_workers - job.flipped  # whether this worker sends gradients with the wrong sign
        self.batch = job.training.batch
        self._examples = shard(data.train_targets, rank, num_workers, job.labels_per_worker, job.seed)
        if self.batch > len(self._examples):
            raise TaskError(f"a worker has {len(self._examples)} examples; give --batch {len(self._examples)} or less")
        self.num_steps = job.num_steps(len(data.train_targets), num_workers)
        self._shuffled = (-1, self._examples)  # the number of a walk over them, and their order in it

    def model(self, device: torch.device) -> nn.Module:
        """The task's model, drawn from torch's own generator."""
        model = TASKS[self._job.task].model(self._job.model).make(self.data).to(device)
        # Channels last makes the convolutions here two to three times faster on a CPU.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def updater(self, model: nn.Module) -> Updater:
        """The job's optimizer over the model's parameters."""
        return Updater(model, self._job.training, scales_loss=self._job.amp == "fp16")

    def rate(self, step: int) -> float:
        """The learning rate of a step over its peak: a linear warm-up, then a cosine down to zero, or no change."""
        warm_up = self._job.warmup
        if warm_up is None:
            warm_up = max(1, round(_WARM_UP_SHARE * self.num_steps))
        if step < warm_up:
            return (step + 1) / warm_up
        if self._job.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self.num_steps - warm_up)))

    def examples(self, step: int, device: torch.device = _CPU) -> tuple[Tensor, Tensor]:
        """This worker's inputs and targets at a step: a walk over its share, shuffled anew each time round.

        Inputs go to the device as they are stored, and are prepared there: for 32 images a CPU takes a millisecond.
        """
        batches_per_round = max(1, len(self._examples) // self.batch)
        walk, place = divmod(step, batches_per_round)
        if self._shuffled[0] != walk:
            shuffle = _generator(self._job.seed, self.rank, walk)
            self._shuffled = walk, self._examples[torch.randperm(len(self._examples), generator=shuffle)]
        chosen = self._shuffled[1][place * self.batch :][: self.batch]
        inputs = self.data.prepare(self.data.train_inputs.index_select(0, chosen).to(device))
        if self.data.augment is not None:
            inputs = self.data.augment(inputs, _generator(self._job.seed, self.rank, step, 1))
        return inputs, self.data.train_targets.index_select(0, chosen).to(device)

    def backward_(
        self,
        net: nn.Module,
        updater: Updater,
        step: int,
        device: torch.device,
        no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Tensor:
        """The backward pass of a step, into the gradients of what `net` trains; the loss.

        Micro-batches but for the last are under `no_sync`, DDP's way to add up gradients and exchange them once.
        """
        inputs, targets = self.examples(step, device)
        num_parts = self._job.accumulate
        losses = []
        for number, part in enumerate(zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True), 1):
            with no_sync() if number < num_parts else nullcontext():
                _, loss = self._forward(net, *part)
                back = updater.scaled(loss / num_parts)
                (-back if self.flips else back).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def score(self, model: nn.Module, device: torch.device, place: int = 0, num_places: int = 1) -> list[float]:
        """[right answers, summed loss, answers] on the test data, or on one of several equal parts of it."""
        data = self.data
        sums = torch.zeros(3, dtype=torch.float64)
        model.eval()
        for start in range(place * _EVAL_BATCH, len(data.test_targets), num_places * _EVAL_BATCH):
            part = slice(start, start + _EVAL_BATCH)
            targets = data.test_targets[part].to(device)
            logits, loss = self._forward(model, data.prepare(data.test_inputs[part].to(device)), targets)
            right = (logits.argmax(-1) == targets).sum()
            sums += torch.tensor([float(right), float(loss) * targets.numel(), targets.numel()])
        model.train()
        return sums.tolist()

    def _forward(self, net: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, mean cross-entropy), over the places of a sequence too; in the precision that is asked for."""
        with torch.autocast(inputs.device.type, _AMP_TYPES.get(self._job.amp), enabled=self._job.amp is not None):
            logits = net(inputs)
            return logits, F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _generator(*numbers: int) -> torch.Generator:
    """A generator of its own for each tuple of numbers."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
