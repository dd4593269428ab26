"""What an exchange is about: whole groups of a model, or entries of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.gossip.vector import ModelVector
from laconic.kernels.host import add_on_host, end_to_end


@dataclass(frozen=True)
class Topic:
    """A part of a model, end to end: whole groups."""

    is_in_order: ClassVar[bool] = True  # as the model lies

    vector: ModelVector
    groups: Sequence[int]  # in which it lies
    room: Tensor | None = None  # where they are read to, if given

    @property
    def num_entries(self) -> int:
        return sum(self.vector.groups[k].num_entries for k in self.groups)

    def read(self) -> Tensor:
        """A float32 copy of what the model is there."""
        return self.vector.read(self.groups, out=self.room)

    def cut(self, flat: Tensor) -> Tensor:
        """What is there in a vector of the whole model; a view of it, if it is one group."""
        parts = self._parts(flat)
        return parts[0] if len(parts) == 1 else end_to_end(parts)

    def add_into_(self, flat: Tensor, delta: Tensor) -> None:
        """Add to what is there in a vector of the whole model."""
        start = 0
        for part in self._parts(flat):
            add_on_host(part, delta[start : start + part.numel()], out=part)
            start += part.numel()

    def spread(self, delta: Tensor, out: Tensor | None = None) -> Tensor:
        """A vector of the whole model that holds this where it belongs, and zero elsewhere; in `out`, if given.

        What is of the whole model already stays where it is.
        """
        if self.is_in_order and delta.numel() == self.vector.num_entries:
            return delta
        whole = torch.empty(self.vector.num_entries, dtype=torch.float32) if out is None else out
        whole.numpy().fill(0)
        self.add_into_(whole, delta)
        return whole

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [flat[self.vector.groups[k].start : self.vector.groups[k].stop] for k in self.groups]


@dataclass(frozen=True, kw_only=True)
class Entries(Topic):
    """Entries at int64 positions, of a model that is one group."""

    is_in_order: ClassVar[bool] = False

    positions: Tensor

    @property
    def num_entries(self) -> int:
        return self.positions.numel()

    def read(self) -> Tensor:
        return self.cut(self.vector.read(out=self.room))

    def cut(self, flat: Tensor) -> Tensor:
        return flat.index_select(0, self.positions)

    def add_into_(self, flat: Tensor, delta: Tensor) -> None:
        flat.index_add_(0, self.positions, delta)
