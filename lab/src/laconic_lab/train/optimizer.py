"""What becomes of a gradient once it is exchanged: unscaled, clipped, applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.optim import Muon
from laconic_lab.tasks import Training


class Updater:
    """A model's optimizer, and what stands between a gradient and its step; the state of both is saved together."""

    def __init__(self, model: nn.Module, training: Training, *, scales_loss: bool = False) -> None:
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._training = training
        self.optimizer = OPTIMIZERS[training.optimizer](model, self._trained, training)
        self._peak_rates = [group["lr"] for group in self.optimizer.param_groups]
        self._scaler = torch.amp.GradScaler(self._trained[0].device.type, enabled=scales_loss)

    def set_rate_(self, share: float) -> None:
        """Give the optimizer a share of the peak learning rate."""
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = share * peak

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """Who scales the loss, if anyone does."""
        return self._scaler if self._scaler.is_enabled() else None

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to go back from."""
        return self._scaler.scale(loss)

    def apply_(self) -> None:
        """One step of the optimizer by the gradients, unscaled and then cut down to the norm they may have.

        Where one of them is Inf or NaN, a scaled loss makes no step and a smaller scale.
        """
        self._scaler.unscale_(self.optimizer)
        if math.isfinite(self._training.clip_norm):
            nn.utils.clip_grad_norm_(self._trained, self._training.clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """To be saved, as entries of a checkpoint."""
        return {"optimizer": self.optimizer.state_dict(), "grad_scaler": self._scaler.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved.get("grad_scaler"):  # empty where nothing was scaled
            self._scaler.load_state_dict(saved["grad_scaler"])


def _sgd(_: nn.Module, trained: Sequence[Tensor], training: Training) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay)


def _adamw(_: nn.Module, trained: Sequence[Tensor], training: Training) -> torch.optim.Optimizer:
    """Weight decay is for matrices: biases and norms have no size to keep small."""
    matrices = [p for p in trained if p.dim() > 1]
    others = [p for p in trained if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    on_gpu = all(p.is_cuda for p in trained)
    return torch.optim.AdamW(
        groups, lr=training.lr, betas=training.betas, weight_decay=training.weight_decay, fused=on_gpu or None
    )


def _muon(model: nn.Module, _: Sequence[Tensor], training: Training) -> torch.optim.Optimizer:
    return Muon(
        model,
        lr=training.lr,
        adamw_lr=training.lr / MUON_OVER_ADAMW,
        betas=training.betas,
        weight_decay=training.weight_decay,
    )


MUON_OVER_ADAMW = 4.0  # rates: matrices bear four times what AdamW does
OPTIMIZERS = {"sgd": _sgd, "adamw": _adamw, "muon": _muon}
