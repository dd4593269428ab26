"""The account of one bucket: deposit the gradient, withdraw what is sent, take back what rounding lost."""

from typing import NamedTuple

import torch
from torch import Tensor


class Due(NamedTuple):
    """What a step owes to a balance: factor * addend, or nothing where the addend is None."""

    addend: Tensor | None
    factor: float

    def at(self, positions: Tensor) -> Tensor:
        """What is owed to these entries."""
        if self.addend is None:
            return torch.zeros(positions.numel(), dtype=torch.float32, device=positions.device)
        owed = self.addend.index_select(0, positions)
        return owed if self.factor == 1 else owed.mul_(self.factor)


class Account:
    """deposits = withdrawals + balance, to float32 rounding; all tensors are flat over the bucket.

    `kept` is everything that outlives a step. The first of it, float32 whatever the gradient's type, is the balance:
    what is owed, and what a selector looks at.
    """

    def __init__(self, *kept: Tensor) -> None:
        self.kept = kept
        self.balance = kept[0] if kept else torch.empty(0)

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        """What unscale * gradient comes to; the caller adds it, together with the withdrawal or by `deposit_`."""
        return Due(gradient.to(torch.float32), unscale)

    def deposit_(self, gradient: Tensor, unscale: float) -> None:
        """Add what is due."""
        addend, factor = self.due_(gradient, unscale)
        if addend is not None:
            self.balance.add_(addend, alpha=factor)

    def withdraw_(self, positions: Tensor | None) -> Tensor:
        """Take the values at `positions` (each once) out, or the whole balance if those are None."""
        if positions is None:
            values = self.balance.clone()
            self.balance.zero_()
        else:
            values = self.balance.index_select(0, positions)
            self.balance.index_fill_(0, positions, 0)
        return values

    def refund_(self, positions: Tensor | None, lost: Tensor) -> None:
        """Put back what rounding lost at `positions`, or everywhere if those are None."""
        if positions is None:
            self.balance.add_(lost)
        else:
            self.balance.index_add_(0, positions, lost)

    def sent_(self, chosen: Tensor, values: Tensor) -> None:
        """Note that the chosen entries, which may have waited, have gone out with these values."""
