"""What two workers write to each other: which groups, and their values in a checked frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.follow.vector import ModelVector
from laconic.quantize import Quantizer
from laconic.wire import FrameShape


class Letter(NamedTuple):
    """A message as it goes out, and the values that its reader will see."""

    message: Tensor  # uint8 on the CPU
    values: Tensor  # float32 on the model's device


class Letters:
    """Writes and reads values of groups: a map of the groups, one byte each, then a frame of their values."""

    def __init__(self, vector: ModelVector, quantize: Quantizer) -> None:
        self._vector, self._quantize = vector, quantize

    def write(self, groups: Sequence[int], values: Tensor) -> Letter:
        """The letter that tells these values; one that only says so where they are not finite."""
        shape = self._shape(groups)
        named = torch.zeros(self._num_named, dtype=torch.uint8)
        named[torch.tensor(list(groups), dtype=torch.int64)] = 1
        if kernels.all_finite(values):
            codes, scale = self._quantize.encode(values)
            empty = torch.empty(0, dtype=torch.int32, device=values.device)
            frame = shape.write(empty, codes, scale, step=0, bucket=0)
            values = self._quantize.decode(codes, scale)
        else:
            frame = shape.write_overflow(values.device, step=0, bucket=0)
        return Letter(torch.cat([named, _on_host(frame)]), values)

    def refuse(self, message: Tensor) -> Tensor:
        """An answer of the same length that says: nothing of this was taken."""
        groups = self.groups(message)
        return torch.cat(
            [message[: self._num_named], self._shape(groups).write_overflow(torch.device("cpu"), step=0, bucket=0)]
        )

    def groups(self, message: Tensor) -> list[int]:
        """The groups that a message is about."""
        return torch.nonzero(message[: len(self._vector.groups)]).view(-1).tolist()

    def read(self, message: Tensor, peer: int) -> Tensor:
        """The values on the model's device; FrameError, which names the peer, if nothing of it may be applied."""
        frame = message[self._num_named :].clone()  # its own memory: views of words must begin on a whole word
        contents = self._shape(self.groups(message)).read(frame, step=0, bucket=0, peer=peer)
        if contents.overflow:
            raise FrameError("one of the two models is not finite")
        if self._vector.device.type == "cuda":
            return contents.values.pin_memory().to(self._vector.device, non_blocking=True)
        return contents.values

    @property
    def _num_named(self) -> int:
        """The bytes of the map: a frame begins on a whole word."""
        return -(-len(self._vector.groups) // 4) * 4

    def _shape(self, groups: Sequence[int]) -> FrameShape:
        count = self._vector.count(groups)
        return FrameShape(count, count, 0, self._quantize)


def _on_host(frame: Tensor) -> Tensor:
    """A frame in the host's memory; on CUDA through pinned memory, waiting for this thread's stream alone."""
    if frame.device.type != "cuda":
        return frame
    host = torch.empty(frame.shape, dtype=frame.dtype, pin_memory=True)
    host.copy_(frame, non_blocking=True)
    torch.cuda.current_stream(frame.device).synchronize()
    return host
