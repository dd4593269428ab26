"""Messages about a model of which only a part goes: the entries that have changed most since they last went."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.quantize import Quantizer
from laconic.replicas.gossip.messages import Question, ValueMessages
from laconic.replicas.gossip.vector import Entries, ModelVector, Topic
from laconic.select import Chooser
from laconic.wire import FrameShape


class EntryMessages(ValueMessages):
    """x - last, where last is what each entry was after the last exchange that it took part in, asked or answered.

    The k that changed most are said; the others keep their change until it is large enough, so nothing is forgotten.
    Small parameters and normalisation buffers go whole. `last` is this worker's own: a peer need not know it. A
    question names the chosen entries by the index block of its frame, whose length both know.
    """

    def __init__(self, vector: ModelVector, quantize: Quantizer, select: Chooser, num_workers: int) -> None:
        super().__init__(vector, quantize)
        self._select = select
        self._plan = select.plan(vector.chosen_layout, select.density_among(num_workers))
        self._searches = [kernels.new_search(w.stop - w.start, w.k, vector.device) for w in self._plan.windows]
        is_whole = torch.ones(vector.num_entries, dtype=torch.bool)
        is_whole[vector.chosen] = False
        self._whole = is_whole.nonzero().view(-1).to(vector.device)  # where entries always go
        self.last = vector.read()
        self._room = vector.room(vector.num_entries)  # where the model is read to
        self.shape = FrameShape(vector.num_entries, self._plan.k, self._whole.numel(), quantize)  # of a question

    def about(self, groups: Sequence[int]) -> Topic:
        return Topic(self._vector, groups, self._room)

    def ask_(self, about: Topic, values: Tensor) -> Question:
        """Of those that always go, then of the k that changed most, ascending.

        The values there are last + (x - last), which is x to a rounding: both ends move by them.
        """
        chosen = self._vector.chosen
        whole = values.index_select(0, self._whole)
        at, change = self._select.withdraw_(values[chosen], self.last[chosen], -1.0, self._plan, self._searches)
        at = at + chosen.start
        said = torch.cat([whole, self.last.index_select(0, at).add_(change)])
        return Question(self._topic(at), said, *self._write(self.shape, at.to(torch.int32), said))

    def question_bytes(self, groups: Sequence[int]) -> int:
        return self.shape.num_bytes

    def answer_bytes(self, groups: Sequence[int]) -> int:
        return self._shape(self.shape.num_fixed + self.shape.k).num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[Entries, Tensor]:
        contents = self._read(self.shape, message, peer)
        return self._topic(contents.positions), contents.values

    def _topic(self, chosen: Tensor) -> Entries:
        positions = torch.cat([self._whole, chosen.to(torch.int64)])
        return Entries(self._vector, (0,), self._room, positions=positions)

    def _note_exchanged_(self, topic: Entries, values: Tensor, way: Tensor) -> None:
        self.last.index_copy_(0, topic.positions, values + way)

    def note_all_said_(self) -> None:
        self.last.copy_(self._vector.read())

    def sample(self, k: int) -> Tensor:
        return self._vector.sample(k, self.last)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last.to("cpu", copy=True)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.last.copy_(saved["last"])
