"""Send everything: the dense schemes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.layout import Layout, positions_of
from laconic.select.bucket_plan import BucketPlan, Chooser, SharedSelector


@dataclass(frozen=True)
class Everything(SharedSelector, Chooser):
    """Every entry, every time."""

    is_shared = True
    sends_all = True
    dense_below = 0

    @property
    def density(self) -> float:
        return 1.0

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        return BucketPlan(layout.num_entries, fixed=layout.spans, windows=())

    def positions(self, plan: BucketPlan, step: int, bucket: int, device: torch.device) -> Tensor:
        return positions_of((), device)
