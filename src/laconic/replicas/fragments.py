"""A model in fragments that are exchanged one after the other: its drift, and its anchor, where it drifted from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from laconic.layout import Bucket, Layout, Span
from laconic.replicas.policy import State, on_host
from laconic.replicas.vector import ModelVector, Part

_BUCKET_ENTRIES = 25 * (1 << 20) // 4  # those of DDP's default: while one travels, the next is selected and encoded


class Fragment:
    """Parameters that are exchanged together; `anchor` is where they were after their last outer step.

    The anchor is float32 whatever the model's type, and equal on all workers, bit for bit, but where they agree in
    pairs: there each has its own. It lies in one piece at `home`, beside the model or on the host. Of a node of several
    processes each exchanges its share, at `own`.
    """

    def __init__(
        self, vector: ModelVector, spans: Sequence[Span], home: torch.device, share: int, num_shares: int
    ) -> None:
        start, stop = spans[0].start, spans[-1].stop
        self._vector = vector
        self.part = Part(start, stop, stop - start)
        self._layout = vector.layout_of(self.part)
        shares = divided(self._layout.spans, num_shares)
        self._bucket_layouts = bucket_layouts(shares[share])
        own_start = sum(span.num_entries for spans in shares[:share] for span in spans)
        self.own = slice(own_start, own_start + sum(layout.num_entries for layout in self._bucket_layouts))
        self.anchor = torch.empty(stop - start, device=home)
        self.anchors = self.views(self.anchor)
        self.anchor.copy_(self.read())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A vector like the anchor, by parameter."""
        return {span.name: flat[span.start : span.stop].view(span.shape) for span in self._layout.spans}

    def read(self) -> Tensor:
        """The model as it is, in float32, where the anchor is."""
        return self._vector.read(self.part, out=torch.empty_like(self.anchor))

    def drift(self, now: Tensor) -> Tensor:
        """How far the model has come from the anchor, as the model's own type has that."""
        return self._vector.rounded(self.anchor, self.part) - now

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


@dataclass
class PendingRound:
    """A fragment's exchange; `mean` is this worker's contribution, and becomes the mean over all, or over a pair."""

    fragment: int
    due: int  # the step after which its result is applied
    is_delayed: bool  # whether the worker trains on meanwhile
    mean: Tensor
    sent: Tensor | None  # the model as it was, where that is asked for later
    buffers: Tensor | None  # of norms, which become their means
    buckets: Sequence[Bucket] = ()  # of the mean
    outcomes: Sequence[Future[Tensor]] = ()  # none where the exchange is over
    missed: Sequence[tuple[int, int]] = ()  # (start, stop) of what came too late: the mean there is that of others

    def wait(self) -> None:
        """Wait until its exchange is over, and note what of it came too late."""
        for outcome in self.outcomes:
            outcome.wait()
        stop = 0
        for bucket in self.buckets:
            start, stop = stop, stop + bucket.layout.num_entries
            if bucket.was_late:
                self.missed = [*self.missed, (start, stop)]
        self.outcomes = self.buckets = ()

    def state_dict(self) -> dict[str, Any]:
        """What is saved, once its exchange is over."""
        kept = ("fragment", "due", "is_delayed", "mean", "sent", "buffers")
        return {**on_host({name: getattr(self, name) for name in kept}), "missed": [list(span) for span in self.missed]}

    @classmethod
    def of(cls, saved: State, device: torch.device) -> PendingRound:
        """The one that was saved."""
        fields: Any = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in saved.items()}
        return cls(**fields)


def fragments_of(
    vector: ModelVector, count: int, home: torch.device, share: int, num_shares: int
) -> dict[int, Fragment]:
    """The parameters in so many fragments, but for empty ones, by number."""
    parts = divided(vector.parameter_spans, count)
    return {number: Fragment(vector, spans, home, share, num_shares) for number, spans in enumerate(parts) if spans}


def divided(spans: Sequence[Span], count: int) -> list[list[Span]]:
    """Neighbours in so many parts of about equal size; a parameter belongs to the part that its middle lies in."""
    num_entries = sum(span.num_entries for span in spans)
    parts: list[list[Span]] = [[] for _ in range(count)]
    start = 0
    for span in spans:
        parts[(2 * start + span.num_entries) * count // (2 * num_entries)].append(span)
        start += span.num_entries
    return parts


def bucket_layouts(spans: Iterable[Span]) -> list[Layout]:
    """Neighbours, as many as fit a bucket; a larger one has one of its own."""
    runs: list[list[Span]] = []
    for span in spans:
        if not runs or sum(other.num_entries for other in runs[-1]) + span.num_entries > _BUCKET_ENTRIES:
            runs.append([])
        runs[-1].append(span)
    return [Layout.of([span.name for span in run], [span.shape for span in run]) for run in runs]
