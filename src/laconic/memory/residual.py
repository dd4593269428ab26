"""Error feedback: what is not sent now is owed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.memory.account import Account


@dataclass(frozen=True, kw_only=True)
class Residual:
    """r += g ; send part of r ; r -= what was sent (Seide et al., Interspeech 2014)."""

    kinds: ClassVar[tuple[str, ...]] = ("residual",)

    def open(self, kept: list[Tensor]) -> Account:
        return ResidualAccount(*kept)


class ResidualAccount:
    """The balance is the residual itself, float32 whatever the gradient's type."""

    def __init__(self, residual: Tensor) -> None:
        self.balance = residual

    def deposit_(self, gradient: Tensor, unscale: float) -> None:
        self.balance.add_(gradient, alpha=unscale)

    def withdraw_(self, positions: Tensor, *, chosen: bool) -> Tensor:
        values = self.balance[positions]
        self.balance[positions] = 0
        return values

    def withdraw_everything_(self) -> Tensor:
        values = self.balance.clone()
        self.balance.zero_()
        return values

    def refund_(self, positions: Tensor | None, lost: Tensor) -> None:
        if positions is None:
            self.balance.add_(lost)
        else:
            self.balance.index_add_(0, positions, lost)

    def snapshot(self) -> list[Tensor]:
        return [self.balance.clone()]

    def restore_(self, snapshot: list[Tensor]) -> None:
        self.balance.copy_(snapshot[0])
