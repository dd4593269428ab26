"""Error feedback: what is not sent now is owed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.memory.account import Account, Due


@dataclass(frozen=True, kw_only=True)
class Residual:
    """r += g ; send part of r ; r -= what was sent (Seide et al., Interspeech 2014)."""

    kinds: ClassVar[tuple[str, ...]] = ("residual",)
    momentum: ClassVar[float] = 0.0
    refunds: ClassVar[bool] = True

    def open(self, kept: list[Tensor]) -> Account:
        return ResidualAccount(*kept)


class ResidualAccount:
    """The balance is the residual itself, float32 whatever the gradient's type."""

    def __init__(self, residual: Tensor) -> None:
        self.kept: Sequence[Tensor] = (residual,)
        self.balance = residual

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        return Due(gradient.to(torch.float32), unscale)

    def deposit_(self, gradient: Tensor, unscale: float) -> None:
        addend, factor = self.due_(gradient, unscale)
        if addend is not None:
            self.balance.add_(addend, alpha=factor)

    def withdraw_(self, positions: Tensor | None) -> Tensor:
        if positions is None:
            values = self.balance.clone()
            self.balance.zero_()
        else:
            values = self.balance.index_select(0, positions)
            self.balance.index_fill_(0, positions, 0)
        return values

    def refund_(self, positions: Tensor | None, lost: Tensor) -> None:
        if positions is None:
            self.balance.add_(lost)
        else:
            self.balance.index_add_(0, positions, lost)

    def sent_(self, chosen: Tensor, values: Tensor) -> None:
        pass
