"""What two workers write to each other: which entries, and their values in a checked frame."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.gossip.unsaid import Unsaid
from laconic.gossip.vector import ModelVector, Topic
from laconic.kernels.host import end_to_end, half_way
from laconic.quantize import Quantizer
from laconic.wire import FrameShape

NO_POSITIONS = torch.empty(0, dtype=torch.int32)  # of a frame about all there is


class Letter(NamedTuple):
    """A message as it goes out, and the values that its reader will see."""

    message: Tensor  # uint8
    values: Tensor  # float32


class Letters:
    """Writes and reads questions, which name what they are about, and answers, which are values alone.

    Whole groups are named by a map, one byte each, before the frame of their values; chosen entries by the index block
    of the frame itself, whose length both ends know.
    """

    def __init__(self, vector: ModelVector, quantize: Quantizer, unsaid: Unsaid | None) -> None:
        self._vector, self._quantize, self._unsaid = vector, quantize, unsaid

    def ask(self, topic: Topic, values: Tensor) -> Letter:
        """A question: what it is about, and this worker's values of it."""
        if not isinstance(topic, Tensor):
            named = torch.zeros(self._num_named, dtype=torch.uint8)
            named[torch.tensor(list(topic), dtype=torch.int64)] = 1
            letter = self.answer(topic, values)
            return Letter(end_to_end([named, letter.message]), letter.values)
        codes, scale = self._quantize.encode(values)
        frame = self._question_shape.write(self._entries.chosen(topic), codes, scale, step=0, bucket=0)
        return Letter(frame, self._quantize.decode(codes, scale))

    def answer(self, topic: Topic, values: Tensor) -> Letter:
        """Values alone, of what the other has named; only that they are not finite, where they are not."""
        shape = self._answer_shape(topic)
        if not kernels.all_finite(values):
            return Letter(shape.write_overflow(values.device, step=0, bucket=0), values)
        codes, scale = self._quantize.encode(values)
        frame = shape.write(NO_POSITIONS, codes, scale, step=0, bucket=0)
        return Letter(frame, self._quantize.decode(codes, scale))

    def open(self, message: Tensor, peer: int) -> tuple[Topic, Tensor]:
        """What a question is about, and the peer's values; FrameError, which names it, if nothing may be applied."""
        if self._unsaid is None:
            groups = torch.nonzero(message[: len(self._vector.groups)]).view(-1).tolist()
            frame = end_to_end([message[self._num_named :]])  # a copy, on a whole word
            return groups, self.read_answer(groups, frame, peer)
        contents = self._question_shape.read(check_taken(message), step=0, bucket=0, peer=peer)
        return self._unsaid.positions(contents.positions), contents.values

    def reply(self, question: Tensor, topic: Topic, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(an answer, the way to the middle from `values`); the answer says so, and no way, if those are not finite."""
        mine = self.answer(topic, values)
        return mine.message, half_way(question, mine.values) if kernels.all_finite(values) else None

    def settle(self, topic: Topic, mine: Letter, reply: Tensor, peer: int) -> Tensor:
        """The way to the middle from the values that were told, after an answer; FrameError as above."""
        return half_way(self.read_answer(topic, reply, peer), mine.values)

    def read_answer(self, topic: Topic, message: Tensor, peer: int) -> Tensor:
        """The peer's values; FrameError as above."""
        contents = self._answer_shape(topic).read(check_taken(message), step=0, bucket=0, peer=peer)
        if contents.overflow:
            raise NotFiniteError
        return contents.values

    def question_bytes(self, topic: Topic) -> int:
        """The length of a question."""
        if self._unsaid is None:
            return self._num_named + self.answer_bytes(topic)
        return self._question_shape.num_bytes

    def answer_bytes(self, topic: Topic) -> int:
        """The length of an answer."""
        return self._answer_shape(topic).num_bytes

    @property
    def _entries(self) -> Unsaid:
        assert self._unsaid is not None
        return self._unsaid

    @property
    def _question_shape(self) -> FrameShape:
        return FrameShape(self._vector.num_entries, self._entries.k, self._entries.num_whole, self._quantize)

    def _answer_shape(self, topic: Topic) -> FrameShape:
        count = self._vector.count(topic) if self._unsaid is None else self._unsaid.num_whole + self._unsaid.k
        return FrameShape(count, count, 0, self._quantize)

    @property
    def _num_named(self) -> int:
        """The bytes of the map: a frame begins on a whole word."""
        return -(-len(self._vector.groups) // 4) * 4


def check_finite(values: Tensor) -> Tensor:
    """These values; FrameError if a letter about them would be of no use."""
    if not kernels.all_finite(values):
        raise FrameError("its own model is not finite")
    return values


class NotFiniteError(FrameError):
    """A letter that only says so."""

    def __init__(self) -> None:
        super().__init__("one of the two models is not finite")


def check_taken(message: Tensor) -> Tensor:
    """This message; FrameError if it is a refusal."""
    if not message[:4].any():
        raise FrameError("nothing of a letter was taken")
    return message


def refusal(num_bytes: int) -> Tensor:
    """An answer that says: nothing of this was taken."""
    return torch.zeros(num_bytes, dtype=torch.uint8)
