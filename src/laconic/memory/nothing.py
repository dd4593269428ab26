"""Keep nothing: what is not sent is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.memory.account import Account


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """No error feedback."""

    kinds: ClassVar[tuple[str, ...]] = ()

    def open(self, kept: list[Tensor]) -> Account:
        return _Purse()


class _Purse:
    """Holds one gradient for the length of one step."""

    def __init__(self) -> None:
        self.balance = torch.empty(0)

    def deposit_(self, gradient: Tensor, unscale: float) -> None:
        self.balance = gradient.to(
            torch.float32
        )  # the gradient itself where it is float32: the dense path copies nothing
        if unscale != 1:
            self.balance = self.balance * unscale

    def withdraw_(self, positions: Tensor, *, chosen: bool) -> Tensor:
        values = self.balance[positions]
        self.balance[positions] = 0
        return values

    def withdraw_everything_(self) -> Tensor:
        return self.balance

    def refund_(self, positions: Tensor | None, lost: Tensor) -> None:
        pass

    def snapshot(self) -> list[Tensor]:
        return []

    def restore_(self, snapshot: list[Tensor]) -> None:
        pass
