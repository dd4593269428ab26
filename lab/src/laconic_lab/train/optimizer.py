"""The training of a job's model: its settings, and what becomes of a gradient once it is exchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.optim import Muon
from laconic.scheme import AnyScheme, Scheme
from laconic_lab.errors import TaskError
from laconic_lab.tasks import Training

_VOTE_LR = 1e-3  # of sparse-sign's authors
_OPTION_OF = {"momentum": ("sgd",), "betas": ("adamw", "muon")}  # which optimizers have it


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
        """The scaler of the loss, if there is one."""
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


def settled(defaults: Training, given: Mapping[str, Any], scheme: AnyScheme) -> Training:
    """The settings of a run; `given` are those that differ from the model's own.

    Where the scheme's memory carries momentum, the optimizer has none, and SGD's lr/(1-m) stays as it was. A vote is a
    step of the rate's own size in every entry: it takes no momentum and no norm, and then SGD's weight decay is
    decoupled, w -= lr*(vote + decay*w).
    """
    votes = isinstance(scheme, Scheme) and scheme.exchange.votes
    if votes:
        if given.get("optimizer", "sgd") != "sgd":
            raise TaskError(f"{scheme} votes on the step itself; give --optimizer sgd, or another scheme")
        if "clip_norm" in given:
            raise TaskError(f"{scheme} votes, and all its votes have one norm; leave --clip-norm out")
        defaults = replace(defaults, optimizer="sgd", lr=_VOTE_LR, clip_norm=math.inf)
    if given.get("optimizer") == "muon" and defaults.optimizer == "adamw":
        defaults = replace(defaults, optimizer="muon", lr=MUON_OVER_ADAMW * defaults.lr)
    training = replace(defaults, **given)
    _check_settings(training, defaults, given)
    if votes:
        return replace(training, momentum=0.0)
    carried = scheme.memory.momentum if isinstance(scheme, Scheme) else 0.0
    if not carried:
        return training
    if training.optimizer == "muon":
        raise TaskError(f"{scheme} carries momentum, and so does muon; give another --optimizer, or another scheme")
    if training.optimizer == "adamw":
        return replace(training, betas=(0.0, training.betas[1]))
    return replace(training, lr=training.lr * (1 - carried) / (1 - training.momentum), momentum=0.0)


def _check_settings(training: Training, defaults: Training, given: Mapping[str, Any]) -> None:
    """Raise, with what to write, where settings do not fit together."""
    if training.optimizer not in OPTIMIZERS:
        raise TaskError(f"--optimizer is {training.optimizer!r}; give {' or '.join(OPTIMIZERS)}")
    for name, optimizers in _OPTION_OF.items():
        if name in given and training.optimizer not in optimizers:
            raise TaskError(f"--{name} is for {optimizers[0]}; leave it out, or give --optimizer {optimizers[0]}")
    if training.optimizer != defaults.optimizer and "lr" not in given:
        raise TaskError(
            f"this model's learning rate, {defaults.lr:g}, is for {defaults.optimizer}; "
            f"give --lr with --optimizer {training.optimizer}"
        )
    if defaults.context is None and training.context is not None:
        raise TaskError("this task's examples are no sequences; leave --context out")
