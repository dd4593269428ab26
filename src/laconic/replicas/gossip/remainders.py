"""Messages between models that are nearly alike: of each value only a remainder goes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.kernels import hash_64
from laconic.quantize import Residue, Told, exponents_for, num_blocks, steps_of
from laconic.replicas.gossip.messages import MessageWriter, Question, check_taken, no_positions, not_finite
from laconic.replicas.gossip.vector import ModelVector, Topic
from laconic.wire import CodesShape, bucket_of

_MARGIN = 1.5  # of what two models may be apart over what they are expected to be
_CHANGE_WEIGHT = 1.5  # a peer's own change comes on top of this worker's
_FADE = 0.8  # per exchange, of what was seen before
_FIRST_SHARE = 1 / 128  # of the largest entry: what is expected before anything was seen
_FINEST_SHARE = 2.0**-20  # of the largest entry: below that float32 has no finer steps


class RemainderMessages(MessageWriter):
    """Writes and reads messages about one group of the model each, and learns how far apart two models are.

    A question tells remainders; its reader answers how far those are from its own values, in steps, and both move by
    half of that, in opposite directions to the last bit.

    reach: how far a block's entries were from a peer's at most, max(seen, 0.8 * reach), and twice as far as was allowed
    for where that was not enough. Allowed for is 1.5 * max(reach, 1.5 * |x - last|), in 2^(bits-1) steps, where last is
    the model after the last exchange (all ours). What there is one of per block is on the host, and entries are where
    the model is. Ways lie in a vector of the writer's own, until it writes the next.
    """

    def __init__(self, vector: ModelVector, residue: Residue, seed: int, rank: int) -> None:
        super().__init__(vector)
        self._residue = residue
        self._draw = (seed, rank)
        self._num_asked = 0
        self.last = vector.read()
        sizes = [group.num_entries for group in vector.groups]
        self._rooms: list[list[Tensor]] = [[] for _ in sizes]  # for values of questions, while nobody has asked them
        self._values, self._way = (vector.room(max(sizes)) for _ in range(2))  # of the exchange at hand
        self.reach = [torch.zeros(num_blocks(n), dtype=torch.float32) for n in sizes]
        self._questions = [CodesShape(n, n, 0, residue) for n in sizes]
        self._answers = [CodesShape(n, n, 0, residue.answer) for n in sizes]

    def about(self, groups: Sequence[int]) -> Topic:
        (k,) = groups
        size = self._vector.groups[k].num_entries
        return Topic(self._vector, groups, self._rooms[k].pop() if self._rooms[k] else self._vector.room(size))

    def ask_(self, about: Topic, values: Tensor) -> Question:
        """A question about a group; its frame names it, where a session's would name a bucket."""
        (k,) = about.groups
        self._num_asked += 1
        told = self._residue.tell(values, self._exponents(k, values), _offset_of(*self._draw, self._num_asked))
        frame = self._questions[k].write(no_positions(values), *self._residue.write(told), step=0, bucket=k)
        return Question(about, values, frame, told)

    def _exponents(self, k: int, values: Tensor) -> Tensor:
        """Those of steps with which a peer's values are expected to be within reach."""
        change, size = (of_block.cpu().numpy() for of_block in kernels.largest_changes(values, self._last(k)))
        reach = self.reach[k].numpy()
        expected = np.maximum(
            np.float32(_CHANGE_WEIGHT) * change, np.where(reach > 0, reach, np.float32(_FIRST_SHARE) * size)
        )
        steps = np.maximum(np.float32(_MARGIN / self._residue.half_range) * expected, np.float32(_FINEST_SHARE) * size)
        return exponents_for(torch.from_numpy(steps))

    def question_bytes(self, groups: Sequence[int]) -> int:
        return self._questions[groups[0]].num_bytes

    def answer_bytes(self, groups: Sequence[int]) -> int:
        return self._answers[groups[0]].num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[Topic, Told]:
        k = bucket_of(message)
        if not 0 <= k < len(self._questions):
            raise FrameError(f"rank {peer} asked about part {k} of {len(self._questions)}")
        size = self._vector.groups[k].num_entries
        topic = Topic(self._vector, [k], self._values[:size])
        told = self._residue.read(*_written(self._questions[k], message, k, peer), topic.num_entries)
        if not 0 <= told.offset < 1:
            raise FrameError(f"rank {peer} sent an offset of {told.offset}, not one in [0, 1)")
        return topic, told

    def reply_(self, topic: Topic, told: Told, values: Tensor) -> tuple[Tensor, Tensor | None]:
        (k,) = topic.groups
        if not kernels.all_finite(values):
            return self._answers[k].write_overflow(values.device, step=0, bucket=k), None
        way, compared = self._residue.compare(values, told, out=self._way[: values.numel()])
        self._learn_(k, compared.peaks, told.exponents, values, way)
        frame = self._answers[k].write(no_positions(values), *self._residue.answer.write(compared), step=0, bucket=k)
        return frame, way

    def settle_(self, question: Question, reply: Tensor, peer: int) -> Tensor:
        topic, values, _, told = question
        (k,) = topic.groups
        answer = self._residue.answer
        compared = answer.read(*_written(self._answers[k], reply, k, peer), topic.num_entries)
        if compared.offset != told.offset:
            raise FrameError(f"rank {peer} answered another question")
        way = answer.way(compared, told.exponents, out=self._way[: topic.num_entries])
        self._learn_(k, compared.peaks, told.exponents, values, way)
        if values is topic.room:
            self._rooms[k].append(values)
        return way

    def _last(self, k: int) -> Tensor:
        group = self._vector.groups[k]
        return self.last[group.start : group.stop]

    def _learn_(self, k: int, peaks: Tensor, exponents: Tensor, values: Tensor, way: Tensor) -> None:
        away = peaks.cpu().numpy().astype(np.float32)
        steps = steps_of(exponents).numpy()
        seen = np.where(away < 0, np.float32(2 * self._residue.half_range / _MARGIN), away + np.float32(0.5)) * steps
        self.reach[k] = torch.from_numpy(np.maximum(seen, np.float32(_FADE) * self.reach[k].numpy()))
        kernels.join_(self._last(k), [values], way)

    def note_all_said_(self) -> None:
        self.last.copy_(self._vector.read())

    def state_dict(self) -> dict[str, Any]:
        last = self.last.to("cpu", copy=True)
        learned = {"last": last, "reach": [each.clone() for each in self.reach], "asked": self._num_asked}
        return {"remainders": learned}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        learned = saved["remainders"]
        self.last.copy_(learned["last"])
        for reach, kept in zip(self.reach, learned["reach"], strict=True):
            reach.copy_(kept)
        self._num_asked = int(learned["asked"])


def _offset_of(*numbers: int) -> float:
    """One of 2^24 offsets in [0, 1), each as likely as the next."""
    return (hash_64(*numbers) >> 40) / 2.0**24


def _written(shape: CodesShape, message: Tensor, k: int, peer: int) -> tuple[Tensor, Tensor]:
    """(codes, scale) as a peer wrote them of a group."""
    written = shape.codes(check_taken(message), step=0, bucket=k, peer=peer)
    if written is None:
        raise not_finite(peer)
    return written
