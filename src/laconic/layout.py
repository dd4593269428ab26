"""Parameter <-> span of a flat buffer, with its shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from laconic.errors import SchemeError

WORTH_HALVING = 1 << 19  # entries of a model; with less to send, one more message takes longer than half of the bytes


@dataclass(frozen=True)
class Span:
    """The half-open range [start, stop) that one parameter occupies in a flat buffer."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...] = field(compare=False)  # a checkpoint knows sizes alone, and its layouts are the same ones

    @property
    def num_entries(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The parameters of one flat buffer, in order and without gaps."""

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, names: Sequence[str], shapes: Sequence[int | Sequence[int]]) -> Layout:
        """Lay parameters end to end; a number stands for the shape of a vector of so many entries."""
        spans = []
        start = 0
        for name, given in zip(names, shapes, strict=True):
            shape = (given,) if isinstance(given, int) else tuple(given)
            stop = start + math.prod(shape)
            spans.append(Span(name, start, stop, shape))
            start = stop
        return cls(tuple(spans))

    def __hash__(self) -> int:  # asked for dozens of times a step, of models with hundreds of spans
        return hash((self.num_entries, len(self.spans), self.spans[0].name if self.spans else ""))

    @cached_property
    def num_entries(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(span.name for span in self.spans)


def plain_name(name: str) -> str:
    """The name without the prefix of compiled modules, which a checkpoint should not depend on."""
    return name.replace("_orig_mod.", "")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, without its graph: the shard of a DTensor, and else all of it."""
    whole = tensor.detach()
    shard: Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return shard


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model's state that workers average: the running means of norms, and the like.

    Counters stay local, and so do buffers that are not part of the state or not finite, like a mask.
    """
    lasting = model.state_dict(keep_vars=True)
    floats = {name: b for name, b in model.named_buffers() if name in lasting and b.is_floating_point() and b.numel()}
    return {name: buffer for name, buffer in floats.items() if bool(buffer.isfinite().all())}


@dataclass
class Bucket:
    """One flat gradient on its way through a session, which overwrites `flat` with the mean over workers."""

    index: int
    layout: Layout
    flat: Tensor
    is_last: bool
    is_plain: bool = False  # goes whole and in its own type, whatever the scheme says
    follows_unused: bool = False  # no optimizer used the gradients of the step before
    was_late: bool = False  # the mean is over the others, who had agreed on it before this worker sent


def halves_of(count: int) -> list[tuple[int, int]]:
    """(start, stop) of the two halves of so many entries; of all of them where that is too little to be halved."""
    middle = -(-count // 2)
    return [(0, middle), (middle, count)] if count >= WORTH_HALVING else [(0, count)]


def positions_of(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Every position of `spans`, in order, as int64."""
    parts = [torch.arange(span.start, span.stop, device=device) for span in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def only_device(parameters: Mapping[str, Tensor]) -> torch.device:
    """The device of all these, by name; SchemeError where they are such as laconic cannot exchange."""
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise SchemeError(f"{name!r} is {parameter.dtype}; laconic exchanges real floating-point numbers")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise SchemeError(f"the model lies on {len(devices)} devices; laconic takes one device per process")
    return devices.pop()
