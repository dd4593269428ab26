"""What two workers write to each other: which entries, and their values in a checked frame."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.kernels import end_to_end, half_way
from laconic.quantize import Quantizer
from laconic.replicas.gossip.vector import ModelVector, Topic
from laconic.wire import Contents, FrameShape


class Question(NamedTuple):
    """A question as it goes out, and what it was made of."""

    topic: Any  # a Topic of its writer's own kind
    values: Tensor  # float32, this worker's
    message: Tensor  # uint8
    told: Any  # the values as its reader will see them


class MessageWriter(Protocol):
    """How two workers write to each other; what a question tells, and of what, is its writer's own affair.

    Unless it says otherwise it tells all that there is of whole groups, so that it has nothing to remember.
    """

    _vector: ModelVector

    def __init__(self, vector: ModelVector) -> None:
        self._vector = vector

    def about(self, groups: Sequence[int]) -> Topic:
        """What must be known of a model before a question about these groups is written."""
        return Topic(self._vector, groups)

    def ask_(self, about: Topic, values: Tensor) -> Question:
        """A question about what has these finite values, which may be overwritten."""

    def question_bytes(self, groups: Sequence[int]) -> int:
        """The length of a question about these groups."""

    def answer_bytes(self, groups: Sequence[int]) -> int:
        """The length of an answer."""

    def open(self, message: Tensor, peer: int) -> tuple[Topic, Any]:
        """What a question is about, and what it tells; FrameError, which names the peer, if nothing may be applied."""

    def reply_(self, topic: Any, told: Any, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(an answer, the way to the middle from `values`); the answer says so, and no way, if those are not finite.

        It is noted that what has these values is going this way.
        """

    def settle_(self, question: Question, reply: Tensor, peer: int) -> Tensor:
        """The way to the middle from the values that were told, after an answer, noted too; FrameError as above."""

    def note_all_said_(self) -> None:
        """Take the model as it is for what peers know of it."""
        return

    def sample(self, k: int) -> Tensor:
        """A sample of what the entries of a group were after their last exchange, where one has just ended."""
        return self._vector.sample(k)

    def state_dict(self) -> dict[str, Any]:
        """What it keeps from exchange to exchange, as plain tensors by name."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        return


class ValueMessages(MessageWriter):
    """Answers that are values alone, of what the other has named."""

    def __init__(self, vector: ModelVector, quantize: Quantizer) -> None:
        super().__init__(vector)
        self._quantize = quantize

    def reply_(self, topic: Any, told: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
        shape = self._shape(values.numel())
        if not kernels.all_finite(values):
            return shape.write_overflow(values.device, step=0, bucket=0), None
        answer, mine = self._write(shape, no_positions(values), values)
        way = half_way(told, mine)
        self._note_exchanged_(topic, values, way)
        return answer, way

    def settle_(self, question: Question, reply: Tensor, peer: int) -> Tensor:
        theirs = self._read(self._shape(question.topic.num_entries), reply, peer).values
        way = half_way(theirs, question.told)
        self._note_exchanged_(question.topic, question.values, way)
        return way

    def _note_exchanged_(self, topic: Any, values: Tensor, way: Tensor) -> None:
        """Note that what had these values is going this way by an exchange."""

    def _shape(self, count: int) -> FrameShape:
        return FrameShape(count, count, 0, self._quantize)

    def _write(self, shape: FrameShape, positions: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(a frame, the values as its reader will see them)."""
        codes, scale = self._quantize.encode(values)
        return shape.write(positions, codes, scale, step=0, bucket=0), self._quantize.decode(codes, scale)

    def _read(self, shape: FrameShape, message: Tensor, peer: int) -> Contents:
        contents = shape.read(check_taken(message), step=0, bucket=0, peer=peer)
        if contents.overflow:
            raise not_finite(peer)
        return contents


class GroupMessages(ValueMessages):
    """Questions about whole groups, named by a map, one byte each, before the frame of their values."""

    def ask_(self, about: Topic, values: Tensor) -> Question:
        named = torch.zeros(self._num_named, dtype=torch.uint8)
        named[torch.tensor(about.groups, dtype=torch.int64)] = 1
        frame, told = self._write(self._shape(values.numel()), no_positions(values), values)
        return Question(about, values, end_to_end([named.to(frame.device), frame]), told)

    def question_bytes(self, groups: Sequence[int]) -> int:
        return self._num_named + self.answer_bytes(groups)

    def answer_bytes(self, groups: Sequence[int]) -> int:
        return self._shape(self.about(groups).num_entries).num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[Topic, Tensor]:
        topic = self.about(torch.nonzero(message[: len(self._vector.groups)]).view(-1).tolist())
        frame = end_to_end([message[self._num_named :]])  # a copy, on a whole word
        return topic, self._read(self._shape(topic.num_entries), frame, peer).values

    @property
    def _num_named(self) -> int:
        """The bytes of the map: a frame begins on a whole word."""
        return -(-len(self._vector.groups) // 4) * 4


def no_positions(values: Tensor) -> Tensor:
    """Of a frame about all there is."""
    return torch.empty(0, dtype=torch.int32, device=values.device)


def check_finite(values: Tensor) -> Tensor:
    """These values; FrameError if a message about them would be of no use."""
    if not kernels.all_finite(values):
        raise FrameError("its own model is not finite")
    return values


def not_finite(peer: int) -> FrameError:
    """Of a message that only says so."""
    return FrameError(f"the model of rank {peer} is not finite")


def check_taken(message: Tensor) -> Tensor:
    """This message; FrameError if it is a refusal."""
    if not message[:16].any():  # where a frame has its check sum and its name
        raise FrameError("nothing of a message was taken")
    return message


def refusal(num_bytes: int) -> Tensor:
    """An answer that says: nothing of this was taken."""
    return torch.zeros(num_bytes, dtype=torch.uint8)
