"""The account of one bucket: deposit the gradient, withdraw what is sent, refund what rounding lost, undo a step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Due(NamedTuple):
    """The debt of a step to a balance: factor * addend, or nothing where the addend is None."""

    addend: Tensor | None
    factor: float

    def at(self, positions: Tensor) -> Tensor:
        """The debt to these entries."""
        if self.addend is None:
            return torch.zeros(positions.numel(), dtype=torch.float32, device=positions.device)
        owed = self.addend.index_select(0, positions)
        return owed if self.factor == 1 else owed.mul_(self.factor)


class Account:
    """An account keeps deposits = withdrawals + balance, to float32 rounding; all tensors are flat over the bucket.

    `kept` is everything that outlives a step. The first of it, float32 whatever the gradient's type, is the balance:
    what is owed, and what a selector looks at.
    """

    def __init__(self, *kept: Tensor) -> None:
        self.kept = kept
        self.balance = kept[0] if kept else torch.empty(0)

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        """The debt of unscale * gradient; the caller adds it, together with the withdrawal or by `deposit_`."""
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

    def sent_(self, selected: Tensor, values: Tensor) -> None:
        """Note that the selected entries, which may have waited, have gone out with these values."""


class Undo:
    """It makes tensors what they were when they were remembered, bit for bit, at the cost of a copy of each."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Copy them as they are."""
        self._before += [(tensor, tensor.clone()) for tensor in tensors]

    def restore_(self, only: Sequence[Tensor] | None = None) -> None:
        """Overwrite everything remembered, or these of it; it stays remembered."""
        for tensor, before in self._before:
            if only is None or any(tensor is each for each in only):
                tensor.copy_(before)

    def forget(self) -> None:
        """Remember nothing: another step begins."""
        self._before = []


class SetAside(Undo):
    """It puts zeros in these views for a while, and then what was there before."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        super().__init__()
        self.remember(views)
        for view in views:
            view.zero_()
