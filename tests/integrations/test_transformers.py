"""Transformers' Trainer, for real, over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from laconic.integrations.transformers import LaconicTrainer
from tests.integrations.common import (
    BATCH,
    OUTER,
    SCHEME,
    Seen,
    advised,
    as_torchrun_does,
    check,
    dataset,
    followed,
    net,
    sgd,
    vector,
    what_shows,
)
from tests.workers import WorkerPool


class Model(nn.Module):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.net = net()
        self.seen = seen

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": self.seen.loss(logits, x, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self._pairs = dataset()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        x, y = self._pairs[number]
        return {"x": x, "labels": y}


def train(
    folder: Path,
    *,
    accumulate: int = 1,
    load: Path | None = None,
    scheme: str = SCHEME,
    saves: bool = True,
    inf_at: int = -1,
    **options: Any,
) -> tuple[Seen, Any, Any]:
    as_torchrun_does()
    seen = Seen(inf_at=inf_at)
    model = Model(seen)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0,
        save_strategy="steps" if saves else "no",
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        ddp_bucket_cap_mb=0.005,
        logging_strategy="no",
    )
    optimizer = sgd(model)
    steady = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = LaconicTrainer(
        model=model,
        args=arguments,
        train_dataset=Rows(),
        optimizers=(optimizer, steady),
        scheme=scheme,
        options=options,
    )
    trainer.train(resume_from_checkpoint=str(load) if load else None)
    return seen, model.net, trainer.session


def _all(folder: Path) -> dict[str, Any]:
    return what_shows(
        {
            "whole": train(folder / "whole"),
            "resumed": train(folder / "again", load=folder / "whole" / "checkpoint-4"),
            "accumulated": train(folder / "many", accumulate=2),
            "spoiled": train(folder / "spoiled", inf_at=3, on_nonfinite="zero"),
        },
        advised(lambda: train(folder / "advised")),
    )


def test_transformers_is_ddp(two_workers: WorkerPool, tmp_path: Path) -> None:
    check(two_workers.run(_all, tmp_path))
    assert len(torch.load(tmp_path / "whole" / "checkpoint-4" / "laconic.pt", weights_only=True)) == 2


def _follow(folder: Path) -> tuple[bool, bool]:
    seen, model, follower = train(folder / "whole", scheme=OUTER)
    same = torch.equal(vector(model), followed(seen.batches))
    _, _, again = train(folder / "again", scheme=OUTER, load=folder / "whole" / "checkpoint-4")
    return same, again.state_dict()["step"] == follower.state_dict()["step"] == 8


def test_transformers_follows(two_workers: WorkerPool, tmp_path: Path) -> None:
    assert two_workers.run(_follow, tmp_path) == [(True, True)] * 2
