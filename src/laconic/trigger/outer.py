"""Then what: how the place that all agreed on moves by the mean of what they drifted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import SchemeError


@dataclass(frozen=True, kw_only=True)
class OuterSGD:
    """anchor -= lr * D: with lr=1 the mean of all models, which is plain averaging (local SGD, Stich 2019)."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        _check_lr(self)

    def optimizer(self, anchors: Sequence[Tensor]) -> torch.optim.Optimizer:
        """What steps the anchors by D in their `.grad`."""
        return torch.optim.SGD(anchors, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class Nesterov:
    """b = momentum*b + D ; anchor -= lr * (D + momentum*b), as in DiLoCo (Douillard et al., 2311.08105)."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_lr(self)
        if not 0 < self.momentum < 1:
            raise SchemeError(f"Nesterov.momentum is {self.momentum}; give a number in (0, 1), or use sgd")

    def optimizer(self, anchors: Sequence[Tensor]) -> torch.optim.Optimizer:
        """What steps the anchors by D in their `.grad`."""
        return torch.optim.SGD(anchors, lr=self.lr, momentum=self.momentum, nesterov=True)


Outer = OuterSGD | Nesterov


def _check_lr(outer: Outer) -> None:
    if not outer.lr > 0:
        raise SchemeError(f"{type(outer).__name__}.lr is {outer.lr}; give a rate above 0, 1 for the mean itself")
