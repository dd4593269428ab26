"""The account of a bucket: deposit the gradient, withdraw what is sent, refund what rounding lost, undo a step.

A ledger has those of all buckets.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from laconic.errors import StateError
from laconic.layout import Layout

A = TypeVar("A")


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
    what was not sent yet, and what a selector looks at.
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


class FadingAccount(Account):
    """An account that keeps fade * balance before + deposit = withdrawn + balance after.

    Who does not deposit does not fade either: an idle parameter, or a worker whose gradient is not finite.
    """

    def __init__(self, fade: float, *kept: Tensor) -> None:
        super().__init__(*kept)
        self._fade = fade

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        self.balance.mul_(self._fade)
        return super().due_(gradient, unscale)


class OneStepAccount(Account):
    """It holds one gradient for the length of one step; it may be the gradient itself, which is overwritten anyway."""

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        self.balance = gradient.to(torch.float32)
        if unscale != 1:
            self.balance = self.balance * unscale
        return Due(None, 1.0)

    def withdraw_(self, positions: Tensor | None) -> Tensor:
        # Selected entries become zero, so that nothing is selected that went already.
        return self.balance if positions is None else super().withdraw_(positions)

    def refund_(self, positions: Tensor | None, lost: Tensor) -> None:
        pass


class MomentumAccount(Account):
    """It deposits the velocity, which it keeps too."""

    def __init__(self, momentum: float, residual: Tensor, velocity: Tensor) -> None:
        super().__init__(residual, velocity)
        self.velocity = velocity
        self.momentum = momentum

    def due_(self, gradient: Tensor, unscale: float) -> Due:
        return Due(self.velocity.mul_(self.momentum).add_(gradient, alpha=unscale), 1.0)

    def sent_(self, selected: Tensor, values: Tensor) -> None:
        # Factor masking is for entries that waited: one that goes at every step is not selected, keeps its momentum and
        # is ordinary momentum SGD; and a zero that merely filled up the k carried nothing.
        self.velocity[selected[values != 0]] = 0


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


class Ledger(Generic[A]):
    """Named float32 tensors that are views of one flat buffer per bucket.

    State belongs to parameters. When DDP cuts its buckets anew, or a checkpoint came from another cut, opening the
    account of an unknown layout moves each parameter's tensors into a new flat buffer; nothing else notices.
    """

    def __init__(self, kinds: Sequence[str], open_account: Callable[[list[Tensor]], A]) -> None:
        self._open_account = open_account  # over the kept tensors of one bucket, one per kind
        self._kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        self._accounts: dict[Layout, A] = {}

    def open(self, layout: Layout, device: torch.device) -> A:
        """The account of a bucket with this layout."""
        account = self._accounts.get(layout)
        if account is None:
            account = self._open_account([self._gather(kind, layout, device) for kind in self._kept])
            moved = set(layout.names)
            self._accounts = {old: a for old, a in self._accounts.items() if moved.isdisjoint(old.names)}
            self._accounts[layout] = account
        return account

    def _gather(self, kind: str, layout: Layout, device: torch.device) -> Tensor:
        """One flat buffer that holds this kind for all parameters of the layout, and is their home from now on."""
        flat = torch.zeros(layout.num_entries, dtype=torch.float32, device=device)
        kept = self._kept[kind]
        for span in layout.spans:
            view = flat[span.start : span.stop]
            if span.name in kept:
                before = kept[span.name].reshape(-1)
                if before.numel() != span.num_entries:
                    raise StateError(
                        f"the state holds {before.numel()} entries for {span.name!r}, the model {span.num_entries}; "
                        "load the state of the same model"
                    )
                view.copy_(before)
            kept[span.name] = view
        return flat

    @property
    def opened(self) -> Mapping[Layout, A]:
        """The accounts of the buckets as they are cut now."""
        return self._accounts

    @property
    def num_bytes(self) -> int:
        """The bytes of all kept tensors."""
        return sum(tensor.nbytes for kept in self._kept.values() for tensor in kept.values())

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """A copy of every kept tensor on the CPU: {kind: {parameter name: 1-d float32}}."""
        return {
            kind: {name: tensor.detach().to("cpu", copy=True) for name, tensor in sorted(kept.items())}
            for kind, kept in self._kept.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Replace everything kept; the next bucket finds its parameters by name."""
        self._accounts = {}
        self._kept = {kind: dict(state.get(kind, {})) for kind in self._kept}
