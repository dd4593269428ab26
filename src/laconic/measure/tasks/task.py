"""A task: examples in memory, models that fit them, and sensible settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from laconic.errors import TaskError


@dataclass(frozen=True)
class Data:
    """Examples as they are stored; `prepare` turns stored inputs into what a model takes."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    prepare: Callable[[Tensor], Tensor]
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None


@dataclass(frozen=True)
class Task:
    """One kind of training job; the first model is its default."""

    name: str
    models: Mapping[str, Callable[[Data], nn.Module]]
    load: Callable[[Path | None], Data]
    lr: float
    momentum: float
    batch: int  # per worker

    def model(self, name: str | None, data: Data) -> nn.Module:
        """A model by name, or the default."""
        if name is not None and name not in self.models:
            raise TaskError(f"task {self.name} has no model {name!r}; give one of {', '.join(self.models)}")
        make = self.models[name] if name is not None else next(iter(self.models.values()))
        return make(data)


def shard(targets: Tensor, rank: int, num_workers: int, labels_per_worker: int | None, seed: int) -> Tensor:
    """The examples of one worker: a random share, or `labels_per_worker` shards of the label-sorted data (non-IID)."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    if labels_per_worker is None:
        return order[rank::num_workers]
    if targets.dim() != 1:
        raise TaskError("this task has no labels to split by; leave --labels-per-worker out")
    by_label = order[torch.argsort(targets[order], stable=True)]
    num_shards = num_workers * labels_per_worker
    if num_shards > len(targets):
        raise TaskError(f"{len(targets)} examples cannot be cut into {num_shards} shards; lower --labels-per-worker")
    shards = by_label.tensor_split(num_shards)
    return torch.cat([shards[rank + num_workers * i] for i in range(labels_per_worker)])
