"""A fragment on its way to the others and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from laconic.layout import Bucket


@dataclass
class Turn:
    """A fragment under way: `mean` is what is told of it, and becomes the mean over all workers, or over a pair."""

    number: int
    due: int  # the step after which its result is applied
    is_late: bool  # whether the worker trains on meanwhile
    mean: Tensor
    sent: Tensor | None  # the model as it was, where that is asked for later
    buffers: Tensor | None  # of norms, which become their means
    buckets: Sequence[Bucket] = ()  # of the mean
    outcomes: Sequence[Future[Tensor]] = ()  # none where the exchange is over
    unheard: Sequence[tuple[int, int]] = ()  # (start, stop) of what was told too late: the mean there is that of others

    def note_unheard(self) -> None:
        """Once its exchange is over."""
        stop = 0
        for bucket in self.buckets:
            start, stop = stop, stop + bucket.layout.num_entries
            if bucket.was_late:
                self.unheard = [*self.unheard, (start, stop)]
        self.buckets = ()

    def state_dict(self) -> dict[str, Any]:
        """To be saved, once its exchange is over."""
        vectors = {"mean": self.mean, "sent": self.sent, "buffers": self.buffers}
        on_host = {name: None if vector is None else vector.to("cpu", copy=True) for name, vector in vectors.items()}
        told = {
            "number": self.number,
            "due": self.due,
            "is_late": self.is_late,
            "unheard": [list(s) for s in self.unheard],
        }
        return {**told, **on_host}

    @classmethod
    def of(cls, saved: Mapping[str, Any], device: torch.device) -> Turn:
        """The one that was saved."""
        vectors: dict[str, Any] = {
            name: None if saved[name] is None else saved[name].to(device) for name in ("mean", "sent", "buffers")
        }
        unheard = [(start, stop) for start, stop in saved.get("unheard", ())]
        return cls(saved["number"], saved["due"], saved["is_late"], **vectors, unheard=unheard)
