"""A model as one vector: its parameters, its averaged buffers, and the parts that are exchanged on their own.

A subset is what one exchange of a gossip is about; a pending update is what the model has not moved by yet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from laconic import kernels
from laconic.errors import SchemeError
from laconic.layout import Layout, Span, averaged_buffers, halves_of, local, only_device, plain_name

_SAMPLE_ENTRIES = 1 << 16  # of a group are measured, or a little more: a norm that is right to half a per cent
_RUN_ENTRIES = 1 << 10  # next to each other, so that what is not measured is not read either


@dataclass(frozen=True)
class Part:
    """Neighbours in the vector: parameters, and the buffers of norms that go with them; it may end amid a tensor."""

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
    """The floating-point parameters and averaged buffers of a model, or of the shard of it that this rank has.

    Counters like num_batches_tracked stay local, and so do buffers that are not part of the model's state or not
    finite, like a mask, and tensors without entries. Values are float32 whatever the model's type.

    `groups` are what gossip exchanges on its own: tensors (`per="tensor"`), the two halves of a large vector
    (`"half"`), or all of it (`"model"`). Where entries are selected (`per="model"`), parameters smaller than
    `whole_below` come first and buffers last, so that those selected from lie next to each other: at `selectable`.
    """

    def __init__(
        self, model: nn.Module, per: str = "model", whole_below: int = 0, *, only_trained: bool = False
    ) -> None:
        self._model = model
        parameters = _parameters(model, only_trained=only_trained)
        self._parameters = dict(sorted(parameters.items(), key=lambda named: local(named[1]).numel() >= whole_below))
        buffers = averaged_buffers(model)
        self._buffer_names = {plain_name(name): name for name in buffers}
        sizes = {name: local(p).numel() for name, p in self._parameters.items()}
        buffer_sizes = {plain_name(name): buffer.numel() for name, buffer in buffers.items()}
        if not self._parameters:
            raise SchemeError("the model has no parameter that is trained; follow one that has")
        self.device = only_device(self._parameters)
        families = _by_tensor(sizes, buffer_sizes) if per == "tensor" else [(list(sizes), list(buffer_sizes))]
        names: list[str] = []
        groups = []
        start = 0
        for weights, others in families:
            names += [*weights, *others]
            num_trained = sum(sizes[name] for name in weights)
            stop = start + num_trained + sum(buffer_sizes[name] for name in others)
            groups.append(Part(start, stop, num_trained))
            start = stop
        self.groups = tuple(groups if per != "half" else _halves(groups[0]))
        self.layout = Layout.of(names, [self._tensor(name).shape for name in names])
        self.num_entries = start
        self.num_trained = sum(sizes.values())
        self.buffers = Part(self.num_trained, start, 0)  # but where groups are tensors
        self._found_spans: dict[Part, list[Span]] = {}
        large = [span for span in self.layout.spans if sizes.get(span.name, -1) >= whole_below]
        self.selectable_layout = Layout.of([s.name for s in large], [s.shape for s in large])
        self.selectable = slice(self.num_trained - self.selectable_layout.num_entries, self.num_trained)

    @property
    def parameter_spans(self) -> list[Span]:
        """Where the parameters lie."""
        return [span for span in self.layout.spans if span.name in self._parameters]

    def is_complete(self) -> bool:
        """Whether the parameters that are trained are still those of the vector."""
        return _parameters(self._model, only_trained=True).keys() == self._parameters.keys()

    def layout_of(self, part: Part) -> Layout:
        """The layout of a part that ends with a tensor."""
        spans = self._spans_in(part)
        return Layout.of([span.name for span in spans], [span.shape for span in spans])

    def read(self, part: Part | None = None, *, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        """A float32 copy of a part, or of all, plus `addend`; in `out`, wherever that lies, or beside the model."""
        part = part or Part(0, self.num_entries, self.num_trained)
        if out is None:
            out = self.empty(part.num_entries)
        spans = self._spans_in(part)
        pieces = []
        for span, row in zip(spans, self._rows(spans), strict=True):
            inside = slice(max(0, part.start - span.start), part.stop - span.start)
            pieces.append(row.reshape(-1)[inside].to(out.device, torch.float32))
        if pieces:
            kernels.join_(out, pieces, addend)
        return out

    def empty(self, num_entries: int) -> Tensor:
        """A vector beside the model, not filled."""
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
        for span in [span for span in self._spans_in(group) if span.stop <= group.trained.stop]:
            flat = self._tensor(span.name).reshape(-1) if whole is None else whole[span.start : span.stop]
            runs = span.num_entries // _RUN_ENTRIES
            if apart > 1 and runs >= apart:
                flat = flat[: runs * _RUN_ENTRIES].view(runs, _RUN_ENTRIES)[::apart].reshape(-1)
            pieces.append(flat.to(torch.float32))
        return torch.cat(pieces).to(self.device)

    @torch.no_grad()
    def write_(self, values: Tensor, part: Part | None = None) -> None:
        """Overwrite a part of the model that ends with a tensor, or all of it."""
        tensors, pieces = self._cut(values, part)
        if tensors:
            torch._foreach_copy_(tensors, pieces)

    @torch.no_grad()
    def add_(self, values: Tensor, part: Part | None = None) -> None:
        """x += values."""
        torch._foreach_add_(*self._cut(values, part))

    @torch.no_grad()
    def mix_(self, values: Tensor, kept: float, part: Part | None = None) -> None:
        """x = kept*x + (1-kept)*values."""
        tensors, pieces = self._cut(values, part)
        cast = [piece.to(tensor.dtype) for tensor, piece in zip(tensors, pieces, strict=True)]
        torch._foreach_lerp_(tensors, cast, 1 - kept)

    def rounded(self, values: Tensor, part: Part) -> Tensor:
        """The values as the model's own type has them, in float32."""
        tensors, pieces = self._cut(values, part)
        if all(tensor.dtype == torch.float32 for tensor in tensors):
            return values
        cast = [piece.to(tensor.dtype).reshape(-1) for tensor, piece in zip(tensors, pieces, strict=True)]
        return torch.cat([piece.to(values.device, torch.float32) for piece in cast])

    @torch.no_grad()
    def move_(self, delta: Tensor, groups: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Add what a vector like the whole model holds in these groups: (tensor, what was added to it) of each.

        A variance changes by at most half of itself.
        """
        spans = list(dict.fromkeys(span for k in groups for span in self._spans_in(self.groups[k])))
        rows = self._rows(spans)
        pieces = [self._inside(groups, span, delta).view(row.shape) for span, row in zip(spans, rows, strict=True)]
        for at, (span, row) in enumerate(zip(spans, rows, strict=True)):
            if span.name.endswith("running_var"):
                pieces[at] = _within_half(pieces[at], row)
        torch._foreach_add_(rows, pieces)
        tensors = [self._parameters.get(span.name, row) for span, row in zip(spans, rows, strict=True)]
        return list(zip(tensors, pieces, strict=True))

    def _inside(self, groups: Collection[int], span: Span, delta: Tensor) -> Tensor:
        """What a vector holds at a span, with zeros where that is in none of these groups."""
        piece = delta[span.start : span.stop]
        others = [group for k, group in enumerate(self.groups) if k not in groups and span in self._spans_in(group)]
        if others:
            piece = piece.clone()
        for group in others:
            piece[max(0, group.start - span.start) : group.stop - span.start] = 0
        return piece

    def _cut(self, values: Tensor, part: Part | None) -> tuple[list[Tensor], list[Tensor]]:
        """(the tensors of a part, or of all, and the values of each beside it, in its shape)."""
        spans = self.layout.spans if part is None else self._spans_in(part)
        start = part.start if part is not None else 0
        beside = values.to(self.device)
        pieces = [beside[span.start - start : span.stop - start].view(span.shape) for span in spans]
        return [self._tensor(span.name) for span in spans], pieces

    def _spans_in(self, part: Part) -> list[Span]:
        if part not in self._found_spans:
            spans = self.layout.spans
            self._found_spans[part] = [span for span in spans if part.start < span.stop and span.start < part.stop]
        return self._found_spans[part]

    def _tensor(self, name: str) -> Tensor:
        """A parameter, or its shard, or a buffer as it is now: a module may have put another in its place."""
        if name in self._parameters:
            return local(self._parameters[name])
        return self._model.get_buffer(self._buffer_names[name]).detach()

    def _rows(self, spans: Sequence[Span]) -> list[Tensor]:
        """Views of each tensor end to end, or in its shape where it does not lie so."""
        tensors = [self._tensor(span.name) for span in spans]
        return [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in tensors]


@dataclass(frozen=True)
class Subset:
    """The entries of a model that an exchange is about, end to end: whole groups."""

    vector: ModelVector
    groups: Sequence[int]  # in which they lie
    out: Tensor | None = None  # where they are read to, if given

    @property
    def num_entries(self) -> int:
        return sum(part.num_entries for part in self._parts)

    @property
    def _parts(self) -> list[Part]:
        return [self.vector.groups[k] for k in self.groups]

    def read(self, pending: PendingUpdate | None = None) -> Tensor:
        """A float32 copy of the model's values, with the pending update."""
        out = self.vector.empty(sum(part.num_entries for part in self._parts)) if self.out is None else self.out
        start = 0
        for k, part in zip(self.groups, self._parts, strict=True):
            addend = pending.whole[part.start : part.stop] if pending is not None and k in pending.groups else None
            self.vector.read(part, out=out[start : start + part.num_entries], addend=addend)
            start += part.num_entries
        return out

    def add_into_(self, flat: Tensor, update: Tensor, filled: Collection[int]) -> None:
        """Add to the `filled` groups of a vector of the whole model; of others overwrite what is there."""
        start = 0
        for k, part in zip(self.groups, self._parts, strict=True):
            piece = flat[part.start : part.stop]
            more = update[start : start + part.num_entries]
            kernels.join_(piece, [piece if k in filled else more], more if k in filled else None)
            start += part.num_entries


@dataclass(frozen=True, kw_only=True)
class EntrySubset(Subset):
    """Entries at int64 positions, of a model that is one group."""

    positions: Tensor

    @property
    def num_entries(self) -> int:
        return self.positions.numel()

    def read(self, pending: PendingUpdate | None = None) -> Tensor:
        return super().read(pending).index_select(0, self.positions)

    def add_into_(self, flat: Tensor, update: Tensor, filled: Collection[int]) -> None:
        if not filled:
            flat.zero_()
        flat.index_add_(0, self.positions, update)


class PendingUpdate:
    """What exchanges have agreed on and the model has not moved by yet; outside `groups` the vector holds anything."""

    def __init__(self, vector: ModelVector) -> None:
        self._vector = vector
        self.whole = vector.empty(vector.num_entries)
        self.groups: set[int] = set()

    def add_(self, subset: Subset, update: Tensor) -> None:
        """Note one more update."""
        subset.add_into_(self.whole, update, self.groups)
        self.groups |= set(subset.groups)

    def read(self) -> Tensor | None:
        """All of it on the host, with zeros elsewhere; None if there is none."""
        if not self.groups:
            return None
        whole = self.whole.to("cpu", copy=True)
        for k, group in enumerate(self._vector.groups):
            if k not in self.groups:
                whole[group.start : group.stop] = 0
        return whole

    def write_(self, whole: Tensor | None) -> None:
        """Replace it."""
        self.groups = set()
        if whole is not None:
            self.whole.copy_(whole)
            self.groups = set(range(len(self._vector.groups)))


def _parameters(model: nn.Module, *, only_trained: bool) -> dict[str, nn.Parameter]:
    """The parameters that have entries on this rank, by name; tied ones are there once."""
    named = {plain_name(name): p for name, p in model.named_parameters()}
    return {name: p for name, p in named.items() if local(p).numel() and (p.requires_grad or not only_trained)}


def _within_half(delta: Tensor, variance: Tensor) -> Tensor:
    """A change by at most half of what is there, so that a variance stays one.

    A message's steps fit the largest entry of a block, and are coarse for the smallest. A mean over workers that this
    does not keep matters little here: a norm estimates its variance anew at every step.
    """
    half = variance.to(delta.dtype) / 2
    return torch.maximum(torch.minimum(delta, half), -half)


def _halves(whole: Part) -> list[Part]:
    return [Part(start, stop, max(0, min(stop, whole.num_trained) - start)) for start, stop in halves_of(whole.stop)]


def _by_tensor(parameters: Collection[str], buffers: Collection[str]) -> list[tuple[list[str], list[str]]]:
    """A group for each parameter; a module's buffers go with its first, or with the model's where it has none."""
    families: dict[str, tuple[list[str], list[str]]] = {name: ([name], []) for name in parameters}
    first: dict[str, str] = {}
    for name in parameters:
        first.setdefault(name.rpartition(".")[0], name)
    for name in buffers:
        families[first.get(name.rpartition(".")[0], next(iter(parameters)))][1].append(name)
    return list(families.values())
