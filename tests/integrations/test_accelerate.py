"""Accelerate, for real, over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.utils.data import DataLoader

import laconic
from laconic.integrations.accelerate import attach
from tests.integrations.common import (
    BATCH,
    BUCKET_MB,
    OUTER,
    SCHEME,
    Seen,
    as_torchrun_does,
    check,
    dataset,
    followed,
    net,
    sgd,
    vector,
    what_four_show,
)
from tests.workers import WorkerPool


def train(
    accumulate: int = 1, save: Path | None = None, load: Path | None = None, inf_at: int = -1, **options: Any
) -> tuple[Seen, Any, Any]:
    as_torchrun_does()
    kwargs: Any = DistributedDataParallelKwargs(bucket_cap_mb=BUCKET_MB)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs], gradient_accumulation_steps=accumulate)
    model = net()
    ddp, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(dataset(), batch_size=BATCH))
    session = attach(accelerator, ddp, SCHEME, **options)
    seen = Seen(inf_at=inf_at)
    if load is not None:
        accelerator.load_state(str(load))
    for epoch in range(0 if load is None else 1, 2):
        if epoch == 1 and save is not None:
            accelerator.save_state(str(save))
        for x, y in loader:
            with accelerator.accumulate(ddp):
                accelerator.backward(seen.loss(ddp(x), x, y))
                optimizer.step()
                optimizer.zero_grad()
    return seen, model, session


def _all(folder: Path) -> dict[str, Any]:
    return what_four_show(train, folder)


def test_accelerate_is_ddp(two_workers: WorkerPool, tmp_path: Path) -> None:
    check(two_workers.run(_all, tmp_path))
    assert len(torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)) == 2


def _follow() -> bool:
    as_torchrun_does()
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer, loader = accelerator.prepare(sgd(model), DataLoader(dataset(), batch_size=BATCH))
    follower = laconic.follow(model, optimizer, OUTER)
    seen = Seen()
    for x, y in loader:
        accelerator.backward(seen.loss(model(x), x, y))
        optimizer.step()
        follower.step()
        optimizer.zero_grad()
    follower.close()
    return torch.equal(vector(model), followed(seen.batches))


def test_follow_with_accelerate(two_workers: WorkerPool) -> None:
    assert all(two_workers.run(_follow))
