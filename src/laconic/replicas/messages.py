"""The messages of a gossip: which entries of a model they are about, and their values in a checked frame."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.kernels import end_to_end, half_way
from laconic.quantize import Quantizer
from laconic.replicas.pending import Subset
from laconic.replicas.vector import ModelVector
from laconic.wire import Contents, FrameShape


class Request(NamedTuple):
    """A request as it goes out, and what it was made of."""

    subset: Any  # a Subset of its writer's own kind
    values: Tensor  # float32, this worker's
    message: Tensor  # uint8
    decoded: Any  # the values as its reader will see them


class MessageWriter(Protocol):
    """How two workers write to each other; which entries a request holds is its writer's own affair.

    Unless a writer overrides that, it sends whole groups, so that it has nothing to remember.
    """

    _vector: ModelVector

    def __init__(self, vector: ModelVector) -> None:
        self._vector = vector

    def subset(self, groups: Sequence[int]) -> Subset:
        """What must be read of a model before a request about these groups is written."""
        return Subset(self._vector, groups)

    def request_(self, subset: Subset, values: Tensor) -> Request:
        """A request about entries with these finite values, which may be overwritten."""

    def request_bytes(self, groups: Sequence[int]) -> int:
        """The length of a request about these groups."""

    def reply_bytes(self, groups: Sequence[int]) -> int:
        """The length of its reply."""

    def open(self, message: Tensor, peer: int) -> tuple[Subset, Any]:
        """(what a request is about, its values); FrameError, which names the peer, if nothing may be applied."""

    def reply_(self, subset: Any, received: Any, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(a reply, the update from `values` to the middle, which is noted); no update if those are not finite."""

    def finish_(self, request: Request, reply: Tensor, peer: int) -> Tensor:
        """The update from the values that were sent to the middle, which is noted; FrameError as above."""

    def note_known_(self) -> None:
        """Take the model as it is for what peers know of it."""
        return

    def sample(self, k: int) -> Tensor:
        """A sample of what the entries of a group were after their last exchange, where one has just ended."""
        return self._vector.sample(k)

    def state_dict(self) -> dict[str, Any]:
        """State that it keeps from exchange to exchange, as plain tensors by name."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        return


class ValueMessages(MessageWriter):
    """Replies that are values alone, of the entries that the request has named."""

    def __init__(self, vector: ModelVector, quantize: Quantizer) -> None:
        super().__init__(vector)
        self._quantize = quantize

    def reply_(self, subset: Any, received: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
        shape = self._shape(values.numel())
        if not kernels.all_finite(values):
            return shape.write_overflow(values.device, step=0, bucket=0), None
        reply, decoded = self._write(shape, no_positions(values), values)
        update = half_way(received, decoded)
        self._note_exchanged_(subset, values, update)
        return reply, update

    def finish_(self, request: Request, reply: Tensor, peer: int) -> Tensor:
        received = self._read(self._shape(request.subset.num_entries), reply, peer).values
        update = half_way(received, request.decoded)
        self._note_exchanged_(request.subset, request.values, update)
        return update

    def _note_exchanged_(self, subset: Any, values: Tensor, update: Tensor) -> None:
        """Note that entries with these values will move by this update."""

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
    """Requests about whole groups, named by a map, one byte each, before the frame of their values."""

    def request_(self, subset: Subset, values: Tensor) -> Request:
        named = torch.zeros(self._num_named, dtype=torch.uint8)
        named[torch.tensor(subset.groups, dtype=torch.int64)] = 1
        frame, decoded = self._write(self._shape(values.numel()), no_positions(values), values)
        return Request(subset, values, end_to_end([named.to(frame.device), frame]), decoded)

    def request_bytes(self, groups: Sequence[int]) -> int:
        return self._num_named + self.reply_bytes(groups)

    def reply_bytes(self, groups: Sequence[int]) -> int:
        return self._shape(self.subset(groups).num_entries).num_bytes

    def open(self, message: Tensor, peer: int) -> tuple[Subset, Tensor]:
        subset = self.subset(torch.nonzero(message[: len(self._vector.groups)]).view(-1).tolist())
        frame = end_to_end([message[self._num_named :]])  # a copy, on a whole word
        return subset, self._read(self._shape(subset.num_entries), frame, peer).values

    @property
    def _num_named(self) -> int:
        """The bytes of the map: a frame begins on a whole word."""
        return -(-len(self._vector.groups) // 4) * 4


def no_positions(values: Tensor) -> Tensor:
    """The positions of a frame about all entries."""
    return torch.empty(0, dtype=torch.int32, device=values.device)


def check_finite(values: Tensor) -> Tensor:
    """These values; FrameError if a message about them would be of no use."""
    if not kernels.all_finite(values):
        raise FrameError("its own model is not finite")
    return values


def not_finite(peer: int) -> FrameError:
    """The error of a message that holds nothing but this."""
    return FrameError(f"the model of rank {peer} is not finite")


def check_taken(message: Tensor) -> Tensor:
    """This message; FrameError if it is a refusal."""
    if not message[:16].any():  # where a frame has its check sum and its name
        raise FrameError("nothing of a message was taken")
    return message


def refusal(num_bytes: int) -> Tensor:
    """A reply of zeros: nothing of the request was taken."""
    return torch.zeros(num_bytes, dtype=torch.uint8)
