"""Messages about a part of a model: the entries that have changed most since they were last exchanged."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.quantize import Quantizer
from laconic.replicas.messages import Request, ValueMessages
from laconic.replicas.pending import EntrySubset, Subset
from laconic.replicas.vector import ModelVector
from laconic.select import Chooser
from laconic.wire import FrameShape


class EntryMessages(ValueMessages):
    """x - last, where last is what each entry was after the last exchange that it took part in.

    The k that changed most are sent; the others keep their change until it is large enough, so nothing is forgotten.
    Small parameters and normalisation buffers go whole. `last` is this worker's own: a peer need not know it. A
    request names the selected entries by the index block of its frame, whose length both know.
    """

    def __init__(self, vector: ModelVector, quantize: Quantizer, select: Chooser, num_workers: int) -> None:
        super().__init__(vector, quantize)
        self._select = select
        self._plan = select.plan(vector.selectable_layout, select.density_among(num_workers))
        self._searches = [kernels.new_search(w.stop - w.start, w.k, vector.device) for w in self._plan.windows]
        is_whole = torch.ones(vector.num_entries, dtype=torch.bool)
        is_whole[vector.selectable] = False
        self._whole = is_whole.nonzero().view(-1).to(vector.device)  # where entries always go
        self.last = vector.read()
        self._out = vector.empty(vector.num_entries)  # where the model is read to
        self.shape = FrameShape(vector.num_entries, self._plan.k, self._whole.numel(), quantize)  # of a request

    def subset(self, groups: Sequence[int]) -> Subset:
        return Subset(self._vector, groups, self._out)

    def request_(self, subset: Subset, values: Tensor) -> Request:
        """A request about those that always go, then about the k that changed most, ascending.

        The values there are last + (x - last), which is x to a rounding: both ends move by them.
        """
        selectable = self._vector.selectable
        whole = values.index_select(0, self._whole)
        at, change = self._select.withdraw_(values[selectable], self.last[selectable], -1.0, self._plan, self._searches)
        at = at + selectable.start
        sent = torch.cat([whole, self.last.index_select(0, at).add_(change)])
        return Request(self._entries(at), sent, *self._write(self.shape, at.to(torch.int32), sent))

    def request_bytes(self, groups: Sequence[int]) -> int:
        return self.shape.num_bytes

    def reply_bytes(self, groups: Sequence[int]) -> int:
        return self._shape(self.shape.num_fixed + self.shape.k).num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[EntrySubset, Tensor]:
        contents = self._read(self.shape, message, peer)
        return self._entries(contents.positions), contents.values

    def _entries(self, selected: Tensor) -> EntrySubset:
        positions = torch.cat([self._whole, selected.to(torch.int64)])
        return EntrySubset(self._vector, (0,), self._out, positions=positions)

    def _note_exchanged_(self, subset: EntrySubset, values: Tensor, update: Tensor) -> None:
        self.last.index_copy_(0, subset.positions, values + update)

    def note_known_(self) -> None:
        self.last.copy_(self._vector.read())

    def sample(self, k: int) -> Tensor:
        return self._vector.sample(k, self.last)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last.to("cpu", copy=True)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.last.copy_(saved["last"])
