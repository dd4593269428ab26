"""The account of one bucket: deposit the gradient, withdraw what is sent, take back what rounding lost."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

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


class Account(Protocol):
    """deposits = withdrawals + balance, to float32 rounding; all tensors are flat over the bucket."""

    kept: Sequence[Tensor]  # everything that outlives a step: the balance, and what else the memory keeps
    balance: Tensor  # float32: what is owed, and what a selector looks at

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        """What unscale * gradient comes to; the caller adds it, together with the withdrawal or by `deposit_`."""

    def deposit_(self, gradient: Tensor, unscale: float) -> None:
        """Add what is due."""

    def withdraw_(self, positions: Tensor | None) -> Tensor:
        """Take the values at `positions` (each once) out, or the whole balance if those are None."""

    def refund_(self, positions: Tensor | None, lost: Tensor) -> None:
        """Put back what rounding lost at `positions`, or everywhere if those are None."""

    def sent_(self, chosen: Tensor, values: Tensor) -> None:
        """Note that the chosen entries, which may have waited, have gone out with these values."""


class Memory(Protocol):
    """The frozen answer to *what is kept*."""

    refunds: ClassVar[bool]  # whether what rounding loses is deposited again
    kinds: ClassVar[tuple[str, ...]]  # the tensors kept per parameter, by the name they have in a checkpoint

    @property
    def momentum(self) -> float:
        """What it carries of an optimizer's momentum; 0: none."""

    def open(self, kept: list[Tensor]) -> Account:
        """An account over the kept tensors of one bucket (one per kind), which it mutates."""
