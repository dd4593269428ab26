"""What a gossip's exchanges are about, and the updates that they leave for the training thread to apply."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from laconic import kernels
from laconic.replicas.vector import ModelVector, Part


@dataclass(frozen=True)
class Subset:
    """The entries of a model that an exchange is about, end to end: whole groups."""

    vector: ModelVector
    groups: Sequence[int]  # in which they lie
    out: Tensor | None = None  # where they are read to, if given

    @property
    def num_entries(self) -> int:
        return sum(part.num_entries for part in self._parts)

    @property
    def _parts(self) -> list[Part]:
        return [self.vector.groups[k] for k in self.groups]

    def read(self, pending: PendingUpdate | None = None) -> Tensor:
        """A float32 copy of the model's values, with the pending update."""
        out = self.vector.empty(sum(part.num_entries for part in self._parts)) if self.out is None else self.out
        start = 0
        for k, part in zip(self.groups, self._parts, strict=True):
            addend = pending.whole[part.start : part.stop] if pending is not None and k in pending.groups else None
            self.vector.read(part, out=out[start : start + part.num_entries], addend=addend)
            start += part.num_entries
        return out

    def add_into_(self, flat: Tensor, update: Tensor, filled: Collection[int]) -> None:
        """Add to the `filled` groups of a vector of the whole model; of others overwrite what is there."""
        start = 0
        for k, part in zip(self.groups, self._parts, strict=True):
            piece = flat[part.start : part.stop]
            more = update[start : start + part.num_entries]
            kernels.join_(piece, [piece if k in filled else more], more if k in filled else None)
            start += part.num_entries


@dataclass(frozen=True, kw_only=True)
class EntrySubset(Subset):
    """Entries at int64 positions, of a model that is one group."""

    positions: Tensor

    @property
    def num_entries(self) -> int:
        return self.positions.numel()

    def read(self, pending: PendingUpdate | None = None) -> Tensor:
        return super().read(pending).index_select(0, self.positions)

    def add_into_(self, flat: Tensor, update: Tensor, filled: Collection[int]) -> None:
        if not filled:
            flat.zero_()
        flat.index_add_(0, self.positions, update)


class PendingUpdate:
    """What exchanges have agreed on and the model has not moved by yet; outside `groups` the vector holds anything."""

    def __init__(self, vector: ModelVector) -> None:
        self._vector = vector
        self.whole = vector.empty(vector.num_entries)
        self.groups: set[int] = set()

    def add_(self, subset: Subset, update: Tensor) -> None:
        """Note one more update."""
        subset.add_into_(self.whole, update, self.groups)
        self.groups |= set(subset.groups)

    def read(self) -> Tensor | None:
        """All of it on the host, with zeros elsewhere; None if there is none."""
        if not self.groups:
            return None
        whole = self.whole.to("cpu", copy=True)
        for k, group in enumerate(self._vector.groups):
            if k not in self.groups:
                whole[group.start : group.stop] = 0
        return whole

    def write_(self, whole: Tensor | None) -> None:
        """Replace it."""
        self.groups = set()
        if whole is not None:
            self.whole.copy_(whole)
            self.groups = set(range(len(self._vector.groups)))
