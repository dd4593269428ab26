"""Then what: how a worker's anchor moves by what it and others drifted from theirs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import SchemeError


@dataclass(frozen=True, kw_only=True)
class Outer:
    """An outer step: workers tell each other their drift, the mean of which is the gradient D of the anchor."""

    lr: float

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise SchemeError(f"{type(self).__name__}.lr is {self.lr}; give a rate above 0, 1 for the mean itself")

    def told(self, anchor: Tensor, drift: Tensor) -> Tensor:
        """What a worker tells of itself."""
        return drift

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """D, of the mean of what workers told."""
        return mean

    def optimizer(self, anchors: Sequence[Tensor]) -> torch.optim.Optimizer:
        """What steps the anchors by D in their `.grad`."""
        return torch.optim.SGD(anchors, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class OuterSGD(Outer):
    """anchor -= lr * D: with lr=1 the mean of all models, which is plain averaging (local SGD, Stich 2019)."""

    lr: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Nesterov(Outer):
    """b = momentum*b + D ; anchor -= lr * (D + momentum*b), as in DiLoCo (Douillard et al., 2311.08105)."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.momentum < 1:
            raise SchemeError(f"Nesterov.momentum is {self.momentum}; give a number in (0, 1), or use sgd")

    def optimizer(self, anchors: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(anchors, lr=self.lr, momentum=self.momentum, nesterov=True)
