"""What becomes of a gradient once it is exchanged: unscaled, clipped, applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.measure.tasks import Training


class Updater:
    """A model's optimizer, and what stands between a gradient and its step; the state of both is saved together."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._training = training
        self.optimizer = OPTIMIZERS[training.optimizer](self._trained, training)

    def set_rate_(self, share: float) -> None:
        """Give the optimizer a share of the peak learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = share * self._training.lr

    def apply_(self) -> None:
        """One step of the optimizer by the gradients as they are, which are cut down to the norm they may have."""
        if math.isfinite(self._training.clip_norm):
            nn.utils.clip_grad_norm_(self._trained, self._training.clip_norm)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """To be saved, as entries of a checkpoint."""
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.optimizer.load_state_dict(saved["optimizer"])


def _sgd(trained: Sequence[Tensor], training: Training) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay)


def _adamw(trained: Sequence[Tensor], training: Training) -> torch.optim.Optimizer:
    """Weight decay is for matrices: biases and norms have no size to keep small."""
    matrices = [p for p in trained if p.dim() > 1]
    others = [p for p in trained if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, weight_decay=training.weight_decay)


OPTIMIZERS = {"sgd": _sgd, "adamw": _adamw}
