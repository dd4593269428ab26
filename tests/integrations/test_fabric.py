"""Fabric, for real, over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

import laconic
from tests.integrations.common import (
    BATCH,
    BUCKET_MB,
    OUTER,
    SCHEME,
    Seen,
    as_torchrun_does,
    check,
    dataset,
    devices_and_nodes,
    followed,
    net,
    sgd,
    vector,
    what_four_show,
)
from tests.workers import WorkerPool


def _fabric() -> Fabric:
    as_torchrun_does()
    fabric = Fabric(accelerator="cpu", **devices_and_nodes(), strategy=DDPStrategy(bucket_cap_mb=BUCKET_MB))
    fabric.launch()
    return fabric


def train(
    accumulate: int = 1, save: Path | None = None, load: Path | None = None, inf_at: int = -1, **options: Any
) -> tuple[Seen, Any, Any]:
    fabric = _fabric()
    bare = net()
    model, optimizer = fabric.setup(bare, sgd(bare))
    loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=BATCH))
    session = laconic.attach(model, SCHEME, **options)
    state = {"model": model, "optimizer": optimizer, "laconic": laconic.RankZeroState(session)}
    seen = Seen(inf_at=inf_at)
    if load is not None:
        fabric.load(load, state)
    for epoch in range(0 if load is None else 1, 2):
        if epoch == 1 and save is not None:
            fabric.save(save, state)
        for number, (x, y) in enumerate(loader, start=1):
            with fabric.no_backward_sync(model, enabled=number % accumulate > 0):
                fabric.backward(seen.loss(model(x), x, y) / accumulate)
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return seen, bare, session


def _all(file: Path) -> dict[str, Any]:
    return what_four_show(train, file)


def test_fabric_is_ddp(two_workers: WorkerPool, tmp_path: Path) -> None:
    check(two_workers.run(_all, tmp_path / "checkpoint.pt"))
    assert len(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["laconic"]) == 2


def _follow() -> bool:
    fabric = _fabric()
    model = net()
    optimizer = sgd(model)
    follower = laconic.follow(model, optimizer, OUTER)
    seen = Seen()
    for x, y in fabric.setup_dataloaders(DataLoader(dataset(), batch_size=BATCH)):
        optimizer.zero_grad()
        fabric.backward(seen.loss(model(x), x, y))
        optimizer.step()
        follower.step()
    follower.close()
    return torch.equal(vector(model), followed(seen.batches))


def test_follow_with_fabric(two_workers: WorkerPool) -> None:
    assert all(two_workers.run(_follow))
