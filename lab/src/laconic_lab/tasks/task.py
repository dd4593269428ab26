"""A task: examples in memory, models that fit them, and sensible settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from laconic_lab.errors import TaskError


@dataclass(frozen=True)
class Data:
    """Examples as they are stored; `prepare` turns stored inputs into what a model takes."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    prepare: Callable[[Tensor], Tensor]
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    vocabulary: int = 0  # how many tokens there are, where examples are made of those


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of training; each field has the name of the option that says otherwise."""

    lr: float  # at its peak
    batch: int  # examples per worker and step
    optimizer: str = "sgd"
    momentum: float = 0.5  # SGD's
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    weight_decay: float = 1e-4
    clip_norm: float = math.inf
    context: int | None = None  # tokens of an example, where it is made of those


@dataclass(frozen=True)
class Model:
    """One kind of model, and how it is trained unless a job says otherwise."""

    make: Callable[[Data], nn.Module]
    training: Training


@dataclass(frozen=True)
class Task:
    """One kind of training job; the first model is its default."""

    name: str
    models: Mapping[str, Model]
    load: Callable[[Path | None, int | None], Data]  # from --data, in examples of --context tokens
    measure: str = "accuracy"  # one of MEASURES, by which models are judged

    def model(self, name: str | None) -> Model:
        """A model by name, or the default."""
        if name is not None and name not in self.models:
            raise TaskError(f"task {self.name} has no model {name!r}; give one of {', '.join(self.models)}")
        return self.models[name] if name is not None else next(iter(self.models.values()))


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
