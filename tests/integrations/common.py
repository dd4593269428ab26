"""One small task for all trainers, and the same steps again under bare DDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import laconic
from tests.logs import logged

SCHEME = "topk:rho=0.05"
OUTER = "diloco:every=2"
BUCKET_MB = 0.005  # about 1,300 float32, so that there are several buckets
BATCH = 8
STEPS_OF_AN_EPOCH = 4


@dataclass
class Seen:
    """What a trainer gave its model, and what came of it."""

    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    inf_at: int = -1  # the batch that spoils rank 1's gradient

    def loss(self, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(logits, y)
        if len(self.batches) == self.inf_at and dist.get_rank() == 1:
            loss = loss * torch.inf
        self.batches.append((x.clone(), y.clone()))
        self.losses.append(float(loss.detach()))
        return loss


def as_torchrun_does() -> None:
    """The variables by which trainers see that they were launched; those of torchrun, where it did."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, TORCHELASTIC_RUN_ID="test")
    os.environ.update(ACCELERATE_USE_CPU="true", GROUP_RANK="0", GROUP_WORLD_SIZE="1")


def devices_and_nodes() -> dict[str, int]:
    """What Lightning wants to be told again."""
    return {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": int(os.environ["GROUP_WORLD_SIZE"])}


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 5))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    number = dist.get_world_size() * STEPS_OF_AN_EPOCH * BATCH
    x = torch.randn(number, 20, generator=generator)
    return TensorDataset(x, (x @ torch.randn(20, 5, generator=generator)).argmax(1))


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def under_bare_ddp(batches: Sequence[tuple[Tensor, Tensor]], accumulate: int = 1) -> dict[str, Any]:
    """The same batches under DDP and attach alone."""
    model = net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    session = laconic.attach(ddp, SCHEME)
    optimizer = sgd(model)
    losses = []
    for number, (x, y) in enumerate(batches, start=1):
        with ddp.no_sync() if number % accumulate else nullcontext():
            loss = cross_entropy(ddp(x), y)
            losses.append(float(loss.detach()))
            (loss / accumulate).backward()  # type: ignore[no-untyped-call]
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "vector": vector(model), "stats": session.stats()}


def followed(batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The model after the same batches under follow alone."""
    model = net()
    optimizer = sgd(model)
    follower = laconic.follow(model, optimizer, OUTER)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        follower.step()
    follower.close()
    return vector(model)


def report(seen: Seen, model: nn.Module, session: Any, accumulate: int = 1) -> dict[str, Any]:
    """How a run compares with bare DDP."""
    bare = under_bare_ddp(seen.batches, accumulate)
    mine, theirs = session.stats(), bare["stats"]
    return {
        "losses": seen.losses == bare["losses"],
        "vector": torch.equal(vector(model), bare["vector"]),
        "bytes": mine.bytes_out == theirs.bytes_out > 0,
        "steps": mine.steps,
        "several buckets": len(session.state_dict()["buckets"]) > 1,
    }


def as_bare_ddp(steps: int) -> dict[str, Any]:
    """What `report` says of a run that is the same bit for bit."""
    return {"losses": True, "vector": True, "bytes": True, "steps": steps, "several buckets": True}


def advised(train: Callable[[], Any]) -> list[str]:
    """What a trainer's ranks log of AdamW, which takes the place of SGD here, on sparse gradients."""

    def adamw(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr)

    with patch.object(torch.optim, "SGD", adamw), logged() as lines:
        train()
    return [line for line in lines if line.startswith("AdamW learns less from the sparse gradients")]


def check(results: Sequence[dict[str, Any]]) -> None:
    """What every trainer's `_all` must show on all ranks."""
    for result in results:
        assert result["bare"] == as_bare_ddp(8)
        assert result["accumulated"] == as_bare_ddp(4)
        assert result["resumed"] and result["finite"]
        assert len(result["advised"]) == (result is results[0])
    assert results[0]["kept"] != results[1]["kept"]  # so what rank 1 resumed with was not rank 0's


def what_four_show(train: Callable[..., tuple[Seen, nn.Module, Any]], place: Path) -> dict[str, Any]:
    """What `check` looks at, of a loop of one's own that saves and loads at a place when told."""
    return what_shows(
        {
            "whole": train(save=place),
            "resumed": train(load=place),
            "accumulated": train(accumulate=2),
            "spoiled": train(inf_at=3, on_nonfinite="zero"),
        },
        advised(train),
    )


def what_shows(runs: dict[str, tuple[Seen, nn.Module, Any]], advice: Sequence[str]) -> dict[str, Any]:
    """What `check` looks at, of a whole run, one that was resumed, one that accumulates, and one with an Inf."""
    seen, model, session = runs["whole"]
    return {
        "advised": advice,
        "bare": report(seen, model, session),
        "accumulated": report(*runs["accumulated"], accumulate=2),
        "resumed": torch.equal(vector(model), vector(runs["resumed"][1])),
        "finite": bool(vector(runs["spoiled"][1]).isfinite().all()) and runs["spoiled"][2].stats().skipped_steps == 1,
        "kept": sum(float(kept.abs().sum()) for kept in session.state_dict()["memory"]["residual"].values()),
    }
