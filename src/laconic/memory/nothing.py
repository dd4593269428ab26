"""Keep nothing: what is not sent is gone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.memory.account import Account, Due


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """No error feedback."""

    kinds: ClassVar[tuple[str, ...]] = ()
    momentum: ClassVar[float] = 0.0
    refunds: ClassVar[bool] = False

    def open(self, kept: list[Tensor]) -> Account:
        return _OneStepAccount()


class _OneStepAccount:
    """Holds one gradient for the length of one step; it may be the gradient itself, which is overwritten anyway."""

    kept: Sequence[Tensor] = ()

    def __init__(self) -> None:
        self.balance = torch.empty(0)

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        self.deposit_(gradient, unscale)
        return Due(None, 1.0)

    def deposit_(self, gradient: Tensor, unscale: float) -> None:
        self.balance = gradient.to(torch.float32)
        if unscale != 1:
            self.balance = self.balance * unscale

    def withdraw_(self, positions: Tensor | None) -> Tensor:
        if positions is None:
            return self.balance
        values = self.balance[positions]
        self.balance[positions] = 0  # so that nothing is chosen that went already
        return values

    def refund_(self, positions: Tensor | None, lost: Tensor) -> None:
        pass

    def sent_(self, chosen: Tensor, values: Tensor) -> None:
        pass
