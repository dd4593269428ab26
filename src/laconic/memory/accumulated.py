"""Accumulation without refunds: where something was sent, however coarsely, the account is cleared."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.errors import SchemeError
from laconic.memory.account import Account, Due
from laconic.memory.residual import ResidualAccount


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """a = w*a + g ; send part of a ; where sent, a = 0, whatever rounding lost (Park and Lee, arXiv 2302.07475).

    The memory for signs, which say nothing of a size; the weight w is ours.
    """

    kinds: ClassVar[tuple[str, ...]] = ("residual",)
    momentum: ClassVar[float] = 0.0
    refunds: ClassVar[bool] = False

    weight: float = 1.0  # of what has been kept; less than 1 forgets

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise SchemeError(f"Accumulated.weight is {self.weight}; give a number in (0, 1]")

    def open(self, kept: list[Tensor]) -> Account:
        return _AccumulatedAccount(kept[0], self.weight)


class _AccumulatedAccount(ResidualAccount):
    def __init__(self, residual: Tensor, weight: float) -> None:
        super().__init__(residual)
        self.weight = weight

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        if self.weight != 1:
            self.balance.mul_(self.weight)
        return super().due_(gradient, unscale)
