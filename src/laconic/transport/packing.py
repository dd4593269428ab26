"""States as messages carry them: numbers, texts and tensors; no pickle, and no more room than the bytes that came."""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FrameError, StateError
from laconic.transport.connection import payload_of

_LENGTH = struct.Struct("<q")  # of the text, before the tensors' bytes


def pack(state: Any) -> Tensor:
    """A state as bytes: a text of its numbers, texts and shapes, and then the entries of its tensors.

    Raises:
        StateError: It holds something else.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_written(state, tensors)).encode()
    entries = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat([payload_of(_LENGTH.pack(len(text)) + text), *entries])


def unpack(frame: Tensor) -> Any:
    """The state that was packed; tensors are copies, on the CPU.

    Raises:
        FrameError: The bytes are no state.
    """
    try:
        (length,) = _LENGTH.unpack(frame[: _LENGTH.size].numpy().data)
        if not 0 <= length <= frame.numel() - _LENGTH.size:
            raise ValueError
        text, entries = frame[_LENGTH.size :].tensor_split([length])
        reader = _Reader(entries)
        state = reader.read(json.loads(bytes(text.numpy())))
        if reader.num_read != entries.numel():
            raise ValueError
        return state
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        RuntimeError,
        struct.error,
    ):  # and RecursionError
        raise FrameError("sent a state that cannot be read; run the same release of laconic on all ranks") from None


def _written(value: Any, tensors: list[Tensor]) -> Any:
    """The value as JSON takes it; a tensor's entries go into `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Mapping):
        return {"dict": [[_written(key, tensors), _written(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_written(item, tensors) for item in value]}
    raise StateError(f"a state cannot hold a {type(value).__name__}; let it keep numbers, texts and tensors")


class _Reader:
    """Reads what was written, with the entries of tensors in the order of their places."""

    def __init__(self, entries: Tensor) -> None:
        self._entries = entries
        self.num_read = 0

    def read(self, written: Any) -> Any:
        if not isinstance(written, dict):
            if isinstance(written, list):
                raise ValueError
            return written
        ((kind, items),) = written.items()
        if kind == "tensor":
            return self._tensor(*items)
        if kind == "dict":
            return {self.read(key): self.read(item) for key, item in items}
        return {"list": list, "tuple": tuple}[kind](map(self.read, items))

    def _tensor(self, dtype: str, shape: list[int]) -> Tensor:
        type_ = getattr(torch, dtype)
        if not isinstance(type_, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError
        stop = self.num_read + math.prod(shape) * type_.itemsize
        if stop > self._entries.numel():
            raise ValueError
        entries = self._entries[self.num_read : stop].clone()  # a word may not begin anywhere
        self.num_read = stop
        return entries.view(type_).view(shape) if entries.numel() else torch.empty(shape, dtype=type_)
