"""All accounts of a session: kept by parameter name, computed on by bucket."""

from collections.abc import Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from laconic.errors import StateError
from laconic.layout import Layout

A_co = TypeVar("A_co", covariant=True)
A = TypeVar("A")


class Keeper(Protocol[A_co]):
    """A memory, or whatever else keeps one tensor of each kind per parameter."""

    kinds: ClassVar[tuple[str, ...]]

    def open(self, kept: list[Tensor]) -> A_co:
        """The object that works on the kept tensors of one bucket."""


class Ledger(Generic[A]):
    """Named float32 tensors that are views of one flat buffer per bucket.

    State belongs to parameters. When DDP cuts its buckets anew, or a checkpoint came from another cut, opening the
    account of an unknown layout moves each parameter's tensors into a new flat buffer; nothing else notices.
    """

    def __init__(self, memory: Keeper[A]) -> None:
        self._memory = memory
        self._kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in memory.kinds}
        self._accounts: dict[Layout, A] = {}

    def open(self, layout: Layout, device: torch.device) -> A:
        """The account of a bucket with this layout."""
        account = self._accounts.get(layout)
        if account is None:
            account = self._memory.open([self._gather(kind, layout, device) for kind in self._memory.kinds])
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
        self._kept = {kind: dict(state.get(kind, {})) for kind in self._memory.kinds}
