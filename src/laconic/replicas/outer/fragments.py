"""A model in fragments that take turns: what a worker drifted, and its anchor, where it drifted from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.errors import SchemeError
from laconic.layout import Bucket, Layout, averaged_buffers, local, plain_name

_BUCKET_ENTRIES = 25 * (1 << 20) // 4  # those of DDP's default: while one travels, the next is chosen and encoded


@dataclass(frozen=True)
class Share:
    """Which of the processes of a node this one is."""

    number: int = 0
    among: int = 1


class Fragment:
    """Parameters that are exchanged together; `anchor` is where they were after their last outer step.

    The anchor is float32 whatever the model's type, and equal on all workers, bit for bit, but where they agree in
    pairs: there each has its own. It lies in one piece at `home`, beside the model or on the host. Of a node of several
    processes each exchanges its `share`.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], home: torch.device, share: Share) -> None:
        self.names = list(named)
        self.parameters = list(named.values())
        self._layout = _layout_of(named)
        dealt = _dealt(named, share.among)
        self._bucket_layouts = bucket_layouts(dealt[share.number])
        start = sum(local(p).numel() for part in dealt[: share.number] for p in part.values())
        self.own = slice(start, start + sum(local(p).numel() for p in dealt[share.number].values()))
        self.anchor = torch.empty(self._layout.num_entries, device=home)
        self.anchors = self.views(self.anchor)  # by parameter
        self.anchor.copy_(self.read())

    @property
    def num_entries(self) -> int:
        return self.anchor.numel()

    @property
    def _here(self) -> list[Tensor]:
        """The parameters, or their shards on this rank."""
        return [local(p) for p in self.parameters]

    def views(self, flat: Tensor) -> list[Tensor]:
        """A vector like the anchor, by parameter."""
        return views_of(flat, self._layout)

    def read(self) -> Tensor:
        """The model as it is, in float32."""
        flat = torch.empty_like(self.anchor)
        torch._foreach_copy_(self.views(flat), self._here)
        return flat

    def drift(self, now: Tensor) -> Tensor:
        """How far the model has come from the anchor, as the model's own type has that."""
        base = self.anchor
        if any(p.dtype != torch.float32 for p in self.parameters):
            base = torch.empty_like(now)
            rounded = [anchor.to(p.dtype) for anchor, p in zip(self.anchors, self.parameters, strict=True)]
            torch._foreach_copy_(self.views(base), rounded)
        return base - now

    def buckets(self, flat: Tensor) -> list[Bucket]:
        """What of a vector like the anchor this process exchanges, cut for a session."""
        buckets = []
        start = self.own.start
        for number, layout in enumerate(self._bucket_layouts, 1):
            stop = start + layout.num_entries
            is_last = number == len(self._bucket_layouts)
            buckets.append(Bucket(number, layout, flat[start:stop], is_last=is_last))
            start = stop
        return buckets

    @torch.no_grad()
    def write_(self, values: Tensor) -> None:
        """Overwrite the model."""
        torch._foreach_copy_(self._here, self._like_model(values))

    @torch.no_grad()
    def add_(self, values: Tensor) -> None:
        """Move the model by this."""
        torch._foreach_add_(self._here, self._beside_model(values))

    @torch.no_grad()
    def mix_(self, values: Tensor, kept: float) -> None:
        """x = kept*x + (1-kept)*values."""
        torch._foreach_lerp_(self._here, self._like_model(values), 1 - kept)

    def _beside_model(self, values: Tensor) -> list[Tensor]:
        """By parameter, where those are."""
        return self.views(values.to(self.parameters[0].device))

    def _like_model(self, values: Tensor) -> list[Tensor]:
        """And in their type."""
        return [view.to(p.dtype) for view, p in zip(self._beside_model(values), self.parameters, strict=True)]


def fragments_of(model: nn.Module, count: int, home: torch.device | None, share: Share) -> dict[int, Fragment]:
    """The trained parameters in so many fragments, but for empty ones; tied ones are there once, frozen ones not."""
    trained = trained_of(model)
    if not trained:
        raise SchemeError("the model has no parameter that is trained; follow one that has")
    for name, p in trained.items():
        if not p.is_floating_point():
            raise SchemeError(f"{name!r} is {p.dtype}; laconic exchanges real numbers only")
    devices = {p.device for p in trained.values()}
    if len(devices) > 1:
        raise SchemeError("the model lies on several devices; laconic takes one device per process")
    home = home or devices.pop()
    return {number: Fragment(part, home, share) for number, part in enumerate(_dealt(trained, count)) if part}


def trained_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained and have entries on this rank, by name."""
    return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad and local(p).numel()}


def _dealt(named: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """Neighbours in so many parts of about equal size; a parameter belongs to the part that its middle lies in."""
    num_entries = sum(local(p).numel() for p in named.values())
    parts: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    start = 0
    for name, p in named.items():
        here = local(p).numel()
        parts[(2 * start + here) * count // (2 * num_entries)][name] = p
        start += here
    return parts


class Buffers:
    """A model's averaged buffers, as one vector."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._nothing = torch.empty(0, device=device)  # where a model has none
        found = averaged_buffers(model)
        self._names = list(found)
        self.layout = _layout_of({plain_name(name): buffer for name, buffer in found.items()})

    @property
    def _tensors(self) -> list[Tensor]:
        """As they are now: a module may have put others in their place."""
        return [self._model.get_buffer(name) for name in self._names]

    def read(self) -> Tensor:
        """All of them in one vector, in float32."""
        there = self._nothing
        return torch.cat([there, *(b.detach().reshape(-1).to(there.device, torch.float32) for b in self._tensors)])

    @torch.no_grad()
    def write_(self, values: Tensor) -> None:
        """Overwrite them."""
        for buffer, view in zip(self._tensors, views_of(values, self.layout), strict=True):
            buffer.copy_(view)


def views_of(flat: Tensor, layout: Layout) -> list[Tensor]:
    """What lies in a vector, by tensor."""
    return [flat[span.start : span.stop].view(span.shape) for span in layout.spans]


def _layout_of(named: Mapping[str, Tensor]) -> Layout:
    return Layout.of(list(named), [local(tensor).shape for tensor in named.values()])


def bucket_layouts(named: Mapping[str, Tensor]) -> list[Layout]:
    """Neighbours, as many as fit a bucket; a larger one has one of its own."""
    return [_layout_of(run) for run in _runs(named)]


def _runs(named: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    run: dict[str, Tensor] = {}
    for name, p in named.items():
        if run and sum(local(q).numel() for q in run.values()) + local(p).numel() > _BUCKET_ENTRIES:
            yield run
            run = {}
        run[name] = p
    if run:
        yield run
