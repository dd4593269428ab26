"""A model as one vector, cut into groups that may travel on their own, and what of it an exchange is about."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from laconic import kernels
from laconic.errors import SchemeError
from laconic.kernels import end_to_end
from laconic.layout import Layout, Span, averaged_buffers, halves_of, plain_name

_SAMPLE_ENTRIES = 1 << 16  # of a group are looked at, or a little more: a norm that is right to half a per cent
_RUN_ENTRIES = 1 << 10  # next to each other, so that what is not looked at is not read either


_Named = dict[str, Tensor]


@dataclass(frozen=True)
class TensorGroup:
    """Neighbours in the vector that travel together: parameters, and the normalisation buffers that go with them.

    A half of the vector may end amid a tensor.
    """

    start: int
    stop: int
    num_trained: int  # entries of parameters, which come first; buffers follow their weights but do not count as change

    @property
    def num_entries(self) -> int:
        return self.stop - self.start

    @property
    def trained(self) -> slice:
        return slice(self.start, self.start + self.num_trained)


class ModelVector:
    """The floating-point parameters and buffers of a model; counters like num_batches_tracked stay local.

    So do buffers that are not part of the model's state or not finite, like a mask, and tensors without entries.

    Vectors lie where the model does: messages are written and read there, and nothing else crosses to the host.
    Groups are tensors (`per="tensor"`), the two halves of a large vector (`"half"`), or all of it (`"model"`).

    Where entries are chosen (`per="model"`), parameters smaller than `whole_below` come first and buffers last, so
    that those chosen from lie next to each other: at `chosen`.
    """

    def __init__(self, model: nn.Module, per: str, whole_below: int = 0) -> None:
        trained: _Named = {plain_name(name): p for name, p in model.named_parameters() if p.numel()}
        trained = dict(sorted(trained.items(), key=lambda named: named[1].numel() >= whole_below))
        running = {plain_name(name): buffer for name, buffer in averaged_buffers(model).items()}
        devices = {tensor.device for tensor in trained.values()}
        if len(devices) != 1:
            raise SchemeError(f"the model lies on {len(devices)} devices; laconic takes one device per process")
        if strange := [name for name, p in trained.items() if not p.is_floating_point()]:
            raise SchemeError(f"{strange[0]!r} is {trained[strange[0]].dtype}; laconic exchanges real numbers only")
        self.device = devices.pop()
        families = _by_tensor(trained, running) if per == "tensor" else [(trained, running)]
        self._tensors: dict[str, Tensor] = {}
        groups = []
        start = 0
        for weights, buffers in families:
            self._tensors |= weights | buffers
            num_trained = _count(weights)
            stop = start + num_trained + _count(buffers)
            groups.append(TensorGroup(start, stop, num_trained))
            start = stop
        self.groups = tuple(groups if per != "half" else _halves(groups[0]))
        self.layout = Layout.of(list(self._tensors), [t.shape for t in self._tensors.values()])
        self._spans_of = [[s for s in self.layout.spans if g.start < s.stop and s.start < g.stop] for g in self.groups]
        self._groups_of = {
            s.name: [k for k, g in enumerate(self.groups) if g.start < s.stop and s.start < g.stop]
            for s in self.layout.spans
        }
        self.num_entries = start
        large = {name: p.shape for name, p in trained.items() if p.numel() >= whole_below}
        self.chosen_layout = Layout.of(list(large), list(large.values()))
        num_trained = _count(trained)
        self.chosen = slice(num_trained - self.chosen_layout.num_entries, num_trained)

    def read(
        self, groups: Sequence[int] | None = None, *, out: Tensor | None = None, owed: Owed | None = None
    ) -> Tensor:
        """A float32 copy of these groups, end to end, with what is owed to them; in `out` if given.

        Of the whole model if none are named.
        """
        named = range(len(self.groups)) if groups is None else groups
        if out is None:
            out = self.room(sum(self.groups[k].num_entries for k in named))
        start = 0
        for k in named:
            group = self.groups[k]
            spans = self._spans_of[k]
            pieces = []
            for span, row in zip(spans, self._rows(spans), strict=True):
                inside = slice(max(0, group.start - span.start), group.stop - span.start)
                pieces.append(row.reshape(-1)[inside].to(torch.float32))
            addend = owed.whole[group.start : group.stop] if owed is not None and k in owed.groups else None
            kernels.join_(out[start : start + group.num_entries], pieces, addend)
            start += group.num_entries
        return out

    def room(self, num_entries: int) -> Tensor:
        """A vector beside the model."""
        if self.device.type == "cpu":  # by numpy, which asks for huge pages: 47 MB are filled in 19 ms instead of 49
            return torch.from_numpy(np.empty(num_entries, np.float32))
        return torch.empty(num_entries, dtype=torch.float32, device=self.device)

    def sample(self, k: int, whole: Tensor | None = None) -> Tensor:
        """The parameters of a group as float32, or of a large one runs of them, evenly spread: enough to measure it.

        They are the model's, or those of a vector like it.
        """
        group = self.groups[k]
        apart = group.num_trained // _SAMPLE_ENTRIES
        pieces = []
        for span in [span for span in self._spans_of[k] if span.stop <= group.trained.stop]:
            flat = self._tensors[span.name].detach().reshape(-1) if whole is None else whole[span.start : span.stop]
            runs = span.num_entries // _RUN_ENTRIES
            if apart > 1 and runs >= apart:
                flat = flat[: runs * _RUN_ENTRIES].view(runs, _RUN_ENTRIES)[::apart].reshape(-1)
            pieces.append(flat.to(torch.float32))
        return torch.cat(pieces).to(self.device)

    @torch.no_grad()
    def add_(self, delta: Tensor, groups: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Add what a vector holds in these groups to the model: (tensor, what was added to it) of each."""
        spans = list(dict.fromkeys(span for k in groups for span in self._spans_of[k]))
        pieces = [self._within(groups, span, delta) for span in spans]
        rows = self._rows(spans)
        pieces = [piece.view(row.shape) for row, piece in zip(rows, pieces, strict=True)]
        for at, (span, row) in enumerate(zip(spans, rows, strict=True)):
            if span.name.endswith("running_var"):
                pieces[at] = _within_half(pieces[at], row)
        torch._foreach_add_(rows, pieces)
        return [(self._tensors[span.name], piece) for span, piece in zip(spans, pieces, strict=True)]

    def _within(self, groups: Collection[int], span: Span, delta: Tensor) -> Tensor:
        """What a vector holds at a span, with zeros where that is in none of these groups."""
        piece = delta[span.start : span.stop]
        others = [k for k in self._groups_of[span.name] if k not in groups]
        if others:
            piece = piece.clone()
        for group in (self.groups[k] for k in others):
            piece[max(0, group.start - span.start) : group.stop - span.start] = 0
        return piece

    @torch.no_grad()
    def write_(self, values: Tensor) -> None:
        """Overwrite the whole model."""
        for span in self.layout.spans:
            tensor = self._tensors[span.name]
            tensor.copy_(values[span.start : span.stop].view(tensor.shape))

    def _rows(self, spans: Sequence[Span]) -> list[Tensor]:
        """Views of each tensor end to end, or in its shape where it does not lie so."""
        tensors = [self._tensors[span.name].detach() for span in spans]
        return [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in tensors]


@dataclass(frozen=True)
class Topic:
    """A part of a model, end to end: whole groups."""

    vector: ModelVector
    groups: Sequence[int]  # in which it lies
    room: Tensor | None = None  # where they are read to, if given

    @property
    def num_entries(self) -> int:
        return sum(self.vector.groups[k].num_entries for k in self.groups)

    def read(self, owed: Owed | None = None) -> Tensor:
        """A float32 copy of what the model is there, with what is owed to it."""
        return self.vector.read(self.groups, out=self.room, owed=owed)

    def cut(self, flat: Tensor) -> Tensor:
        """What is there in a vector of the whole model; a view of it, if it is one group."""
        parts = self._parts(flat)
        return parts[0] if len(parts) == 1 else end_to_end(parts)

    def add_into_(self, flat: Tensor, delta: Tensor, there: Collection[int]) -> None:
        """Add to what is in these groups of a vector of the whole model; of others overwrite what is there."""
        start = 0
        for k, part in zip(self.groups, self._parts(flat), strict=True):
            more = delta[start : start + part.numel()]
            if k in there:
                kernels.join_(part, [part], more)
            else:
                kernels.join_(part, [more])
            start += part.numel()

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [flat[self.vector.groups[k].start : self.vector.groups[k].stop] for k in self.groups]


@dataclass(frozen=True, kw_only=True)
class Entries(Topic):
    """Entries at int64 positions, of a model that is one group."""

    positions: Tensor

    @property
    def num_entries(self) -> int:
        return self.positions.numel()

    def read(self, owed: Owed | None = None) -> Tensor:
        return self.cut(self.vector.read(out=self.room, owed=owed))

    def cut(self, flat: Tensor) -> Tensor:
        return flat.index_select(0, self.positions)

    def add_into_(self, flat: Tensor, delta: Tensor, there: Collection[int]) -> None:
        if not there:
            flat.zero_()
        flat.index_add_(0, self.positions, delta)


class Owed:
    """What exchanges owe to a model, in the groups that they were about; elsewhere the vector holds anything."""

    def __init__(self, vector: ModelVector) -> None:
        self._vector = vector
        self.whole = vector.room(vector.num_entries)
        self.groups: set[int] = set()

    def add_(self, topic: Topic, way: Tensor) -> None:
        """Owe this too."""
        topic.add_into_(self.whole, way, self.groups)
        self.groups |= set(topic.groups)

    def read(self) -> Tensor | None:
        """On the host, with zeros where nothing is owed; None if nothing is at all."""
        if not self.groups:
            return None
        owed = self.whole.to("cpu", copy=True)
        for k, group in enumerate(self._vector.groups):
            if k not in self.groups:
                owed[group.start : group.stop] = 0
        return owed

    def write_(self, owed: Tensor | None) -> None:
        """Owe this alone."""
        self.groups = set()
        if owed is not None:
            self.whole.copy_(owed)
            self.groups = set(range(len(self._vector.groups)))


def _within_half(delta: Tensor, variance: Tensor) -> Tensor:
    """A change by at most half of what is there, so that a variance stays one.

    A message's steps fit the largest entry of a block, and are coarse for the smallest. A mean over workers that this
    does not keep matters little here: a norm estimates its variance anew at every step.
    """
    half = variance.to(delta.dtype) / 2
    return torch.maximum(torch.minimum(delta, half), -half)


def _halves(whole: TensorGroup) -> list[TensorGroup]:
    return [
        TensorGroup(start, stop, max(0, min(stop, whole.num_trained) - start)) for start, stop in halves_of(whole.stop)
    ]


def _count(tensors: _Named) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _by_tensor(trained: _Named, running: _Named) -> list[tuple[_Named, _Named]]:
    """A group for each parameter; a module's buffers go with its first, or with the model's where it has none."""
    families: dict[str, tuple[_Named, _Named]] = {name: ({name: p}, {}) for name, p in trained.items()}
    first: dict[str, str] = {}
    for name in trained:
        first.setdefault(name.rpartition(".")[0], name)
    for name, buffer in running.items():
        _, buffers = families[first.get(name.rpartition(".")[0], next(iter(trained)))]
        buffers[name] = buffer
    return list(families.values())
