"""What two workers write to each other: which entries, and their values in a checked frame."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.gossip.changed_entries import ChangedEntries
from laconic.gossip.topic import Entries, Groups, Topic
from laconic.gossip.vector import ModelVector
from laconic.kernels.host import end_to_end, half_way
from laconic.quantize import Quantizer
from laconic.wire import FrameShape

NO_POSITIONS = torch.empty(0, dtype=torch.int32)  # of a frame about all there is

T = TypeVar("T", bound=Topic)


class MessageWriter(ABC, Generic[T]):
    """How two workers write to each other; what a question is besides its message is its writer's own affair.

    Unless it says otherwise it tells all that there is of whole groups, so that it has nothing to remember.
    """

    def __init__(self, vector: ModelVector) -> None:
        self._vector = vector

    def about(self, groups: Sequence[int]) -> Groups:
        """What must be known of a model before a question about these groups is written."""
        return Groups(self._vector, groups)

    @abstractmethod
    def choose_(self, about: Groups, values: Tensor) -> tuple[T, Tensor]:
        """(what is said of these values, the values there); `values` may be overwritten."""

    @abstractmethod
    def ask(self, topic: T, values: Tensor) -> Any:
        """A question, with a `message` that goes out: this worker's values of what it is about."""

    @abstractmethod
    def question_bytes(self, groups: Sequence[int]) -> int:
        """The length of a question about these groups."""

    @abstractmethod
    def answer_bytes(self, groups: Sequence[int]) -> int:
        """The length of an answer."""

    @abstractmethod
    def open(self, message: Tensor, peer: int) -> tuple[T, Any]:
        """What a question is about, and what it says; FrameError, which names the peer, if nothing may be applied."""

    @abstractmethod
    def reply(self, question: Any, topic: T, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(an answer, the way to the middle from `values`); the answer says so, and no way, if those are not finite."""

    @abstractmethod
    def settle(self, topic: T, mine: Any, reply: Tensor, peer: int) -> Tensor:
        """The way to the middle from the values that were told, after an answer; FrameError as above."""

    def note_exchanged_(self, topic: T, values: Tensor, way: Tensor) -> None:
        """Note that what had these values is going this way by an exchange."""

    def note_all_said_(self) -> None:
        """Take the model as it is for what peers know of it."""

    def sample(self, k: int) -> Tensor:
        """A sample of what the entries of a group were after their last exchange, where one has just ended."""
        return self._vector.sample(k)

    def state_dict(self) -> dict[str, Any]:
        """What it keeps from exchange to exchange, as plain tensors by name."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""


class Question(NamedTuple):
    """A message as it goes out, and the values that its reader will see."""

    message: Tensor  # uint8
    values: Tensor  # float32


class ValueMessages(MessageWriter[T]):
    """Answers that are values alone, of what the other has named."""

    def __init__(self, vector: ModelVector, quantize: Quantizer) -> None:
        super().__init__(vector)
        self._quantize = quantize

    def answer(self, values: Tensor) -> Question:
        """These values; only that they are not finite, where they are not."""
        shape = self._shape(values.numel())
        if not kernels.all_finite(values):
            return Question(shape.write_overflow(values.device, step=0, bucket=0), values)
        return self._written(shape, NO_POSITIONS, values)

    def read_answer(self, topic: T, message: Tensor, peer: int) -> Tensor:
        """The peer's values; FrameError, which names it, if nothing may be applied."""
        contents = self._shape(topic.num_entries).read(check_taken(message), step=0, bucket=0, peer=peer)
        if contents.overflow:
            raise NotFiniteError
        return contents.values

    def reply(self, question: Tensor, topic: T, values: Tensor) -> tuple[Tensor, Tensor | None]:
        mine = self.answer(values)
        return mine.message, half_way(question, mine.values) if kernels.all_finite(values) else None

    def settle(self, topic: T, mine: Question, reply: Tensor, peer: int) -> Tensor:
        return half_way(self.read_answer(topic, reply, peer), mine.values)

    def _shape(self, count: int) -> FrameShape:
        return FrameShape(count, count, 0, self._quantize)

    def _written(self, shape: FrameShape, positions: Tensor, values: Tensor) -> Question:
        codes, scale = self._quantize.encode(values)
        frame = shape.write(positions, codes, scale, step=0, bucket=0)
        return Question(frame, self._quantize.decode(codes, scale))


class GroupMessages(ValueMessages[Groups]):
    """Questions about whole groups, named by a map, one byte each, before the frame of their values."""

    def choose_(self, about: Groups, values: Tensor) -> tuple[Groups, Tensor]:
        return about, values

    def ask(self, topic: Groups, values: Tensor) -> Question:
        named = torch.zeros(self._num_named, dtype=torch.uint8)
        named[torch.tensor(topic.groups, dtype=torch.int64)] = 1
        answer = self.answer(values)
        return Question(end_to_end([named, answer.message]), answer.values)

    def question_bytes(self, groups: Sequence[int]) -> int:
        return self._num_named + self.answer_bytes(groups)

    def answer_bytes(self, groups: Sequence[int]) -> int:
        return self._shape(self.about(groups).num_entries).num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[Groups, Tensor]:
        topic = self.about(torch.nonzero(message[: len(self._vector.groups)]).view(-1).tolist())
        frame = end_to_end([message[self._num_named :]])  # a copy, on a whole word
        return topic, self.read_answer(topic, frame, peer)

    @property
    def _num_named(self) -> int:
        """The bytes of the map: a frame begins on a whole word."""
        return -(-len(self._vector.groups) // 4) * 4


class EntryMessages(ValueMessages[Entries]):
    """Questions about the entries that changed most, named by the index block of the frame, whose length both know."""

    def __init__(self, vector: ModelVector, quantize: Quantizer, entries: ChangedEntries) -> None:
        super().__init__(vector, quantize)
        self._entries = entries
        self._room = vector.room(vector.num_entries)  # where the model is read to
        self._question = FrameShape(vector.num_entries, entries.k, entries.num_whole, quantize)

    def about(self, groups: Sequence[int]) -> Groups:
        return Groups(self._vector, groups, self._room)

    def choose_(self, about: Groups, values: Tensor) -> tuple[Entries, Tensor]:
        positions, values = self._entries.choose_(values)
        return self._topic(positions), values

    def ask(self, topic: Entries, values: Tensor) -> Question:
        return self._written(self._question, self._entries.chosen(topic.positions), values)

    def question_bytes(self, groups: Sequence[int]) -> int:
        return self._question.num_bytes

    def answer_bytes(self, groups: Sequence[int]) -> int:
        return self._shape(self._entries.num_whole + self._entries.k).num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[Entries, Tensor]:
        contents = self._question.read(check_taken(message), step=0, bucket=0, peer=peer)
        return self._topic(self._entries.positions(contents.positions)), contents.values

    def _topic(self, positions: Tensor) -> Entries:
        return Entries(self._vector, (0,), positions, self._room)

    def note_exchanged_(self, topic: Entries, values: Tensor, way: Tensor) -> None:
        self._entries.last.index_copy_(0, topic.positions, values + way)

    def note_all_said_(self) -> None:
        self._entries.last.copy_(self._vector.read())

    def sample(self, k: int) -> Tensor:
        return self._vector.sample(k, self._entries.last)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._entries.last.clone()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._entries.last.copy_(saved["last"])


def check_finite(values: Tensor) -> Tensor:
    """These values; FrameError if a message about them would be of no use."""
    if not kernels.all_finite(values):
        raise FrameError("its own model is not finite")
    return values


class NotFiniteError(FrameError):
    """A message that only says so."""

    def __init__(self) -> None:
        super().__init__("one of the two models is not finite")


def check_taken(message: Tensor) -> Tensor:
    """This message; FrameError if it is a refusal."""
    if not message[:4].any():
        raise FrameError("nothing of a message was taken")
    return message


def refusal(num_bytes: int) -> Tensor:
    """An answer that says: nothing of this was taken."""
    return torch.zeros(num_bytes, dtype=torch.uint8)
