"""Lightning's Trainer, for real, over two processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader

from laconic import SchemeError
from laconic.integrations.lightning import LaconicStrategy
from tests.integrations.common import (
    BATCH,
    BUCKET_MB,
    OUTER,
    SCHEME,
    Seen,
    advised,
    as_torchrun_does,
    check,
    dataset,
    devices_and_nodes,
    followed,
    net,
    sgd,
    vector,
    what_shows,
)
from tests.workers import WorkerPool


class Module(LightningModule):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.net = net()
        self.seen = seen

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return self.seen.loss(self.net(x), x, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def train(
    folder: Path,
    *,
    accumulate: int = 1,
    epochs: int = 2,
    load: Path | None = None,
    scheme: str = SCHEME,
    inf_at: int = -1,
    **options: Any,
) -> tuple[Seen, Any, Any]:
    as_torchrun_does()
    strategy = LaconicStrategy(scheme, options=options, bucket_cap_mb=BUCKET_MB)
    trainer = Trainer(
        accelerator="cpu",
        **devices_and_nodes(),
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    seen = Seen(inf_at=inf_at)
    module = Module(seen)
    trainer.fit(module, DataLoader(dataset(), batch_size=BATCH), ckpt_path=load)
    if epochs == 1:
        trainer.save_checkpoint(folder / "one.ckpt")
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, DataLoader(dataset(), batch_size=BATCH))  # wraps the model anew
    return seen, module.net, strategy.session


def _all(folder: Path) -> dict[str, Any]:
    _, _, twice = train(folder, epochs=1)
    assert twice.stats().steps == 8  # its session went on
    return what_shows(
        {
            "whole": train(folder),
            "resumed": train(folder, load=folder / "one.ckpt"),
            "accumulated": train(folder, accumulate=2),
            "spoiled": train(folder, inf_at=3, on_nonfinite="zero"),
        },
        advised(lambda: train(folder / "advised")),
    )


def test_lightning_is_ddp(two_workers: WorkerPool, tmp_path: Path) -> None:
    check(two_workers.run(_all, tmp_path))
    assert len(torch.load(tmp_path / "one.ckpt", weights_only=True)["laconic"]) == 2


def _follow(folder: Path) -> tuple[bool, bool]:
    seen, model, follower = train(folder, scheme=OUTER)
    same = torch.equal(vector(model), followed(seen.batches))
    twice = train(folder, scheme=OUTER, epochs=1)[2].state_dict()["step"]
    again = train(folder, scheme=OUTER, load=folder / "one.ckpt")[2].state_dict()["step"]
    follower.close()
    return same, (twice, again) == (8, 8)


def test_lightning_follows(two_workers: WorkerPool, tmp_path: Path) -> None:
    assert two_workers.run(_follow, tmp_path) == [(True, True)] * 2


def test_a_module_without_an_optimizer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DDPStrategy, "setup", lambda strategy, trainer: None)
    strategy = LaconicStrategy(SCHEME)
    strategy.model = net()
    fits: Any = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
    with pytest.raises(SchemeError, match="configure_optimizers"):
        strategy.setup(fits)
