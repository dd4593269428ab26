"""Momentum correction and factor masking, as in Deep Gradient Compression."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.errors import SchemeError
from laconic.memory.account import Account, Due
from laconic.memory.residual import ResidualAccount


@dataclass(frozen=True, kw_only=True)
class MomentumResidual:
    """u = m*u + g ; v += u ; send part of v ; where sent, v = 0 and u = 0 (Lin et al., ICLR 2018).

    The momentum lives here, before the exchange, so the optimizer must have none of its own.
    """

    kinds: ClassVar[tuple[str, ...]] = ("residual", "velocity")
    refunds: ClassVar[bool] = True

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise SchemeError(f"MomentumResidual.momentum is {self.momentum}; give a number in [0, 1)")

    def open(self, kept: list[Tensor]) -> Account:
        residual, velocity = kept
        return _MomentumAccount(residual, velocity, self.momentum)


class _MomentumAccount(ResidualAccount):
    def __init__(self, residual: Tensor, velocity: Tensor, momentum: float) -> None:
        super().__init__(residual)
        self.kept = (residual, velocity)
        self.velocity = velocity
        self.momentum = momentum

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        return Due(self.velocity.mul_(self.momentum).add_(gradient, alpha=unscale), 1.0)

    def sent_(self, chosen: Tensor, values: Tensor) -> None:
        # Factor masking is for entries that waited: one that goes at every step is not chosen, keeps its momentum and
        # is ordinary momentum SGD; and a zero that merely filled up the k carried nothing.
        self.velocity[chosen[values != 0]] = 0
