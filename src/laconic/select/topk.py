"""Exact top-k: the entries that matter most now."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import SchemeError
from laconic.layout import Layout
from laconic.select.plan import Plan, Window

_SCOPES = ("bucket", "parameter")


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The k = max(1, round(rho*N)) largest |r|, ties to the lower position (Aji and Heafield, EMNLP 2017).

    `per="bucket"` ranks a whole bucket at once; `per="parameter"` takes a share of each parameter, so that the result
    does not depend on how DDP cuts its buckets.
    """

    rho: float  # share of entries sent; smaller sends less
    per: str = "bucket"
    dense_below: int = 1000  # parameters with fewer entries go whole: choosing would cost more than it saves

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1:
            raise SchemeError(f"TopK.rho is {self.rho}; give a share in (0, 1]")
        if self.per not in _SCOPES:
            raise SchemeError(f"TopK.per is {self.per!r}; give one of {', '.join(_SCOPES)}")
        if self.dense_below < 0:
            raise SchemeError(f"TopK.dense_below is {self.dense_below}; give a number of entries, 0 or more")

    @property
    def density(self) -> float:
        return self.rho

    def plan(self, layout: Layout, density: float) -> Plan:
        small = tuple(span for span in layout.spans if span.num_entries < self.dense_below)
        large = [span for span in layout.spans if span.num_entries >= self.dense_below and span.num_entries > 0]
        if self.per == "parameter":
            windows = [Window(span.start, span.stop, _share(span.num_entries, density)) for span in large]
        else:
            num_large = sum(span.num_entries for span in large)
            windows = [Window(0, layout.num_entries, _share(num_large, density))] if large else []
        return Plan(layout.num_entries, fixed=small, windows=tuple(windows))

    def choose(self, balance: Tensor, plan: Plan) -> Tensor:
        parts = [
            kernels.top_k_positions(balance[window.start : window.stop], window.k) + window.start
            for window in plan.windows
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=balance.device)


def _share(num_entries: int, density: float) -> int:
    return min(num_entries, max(1, round(density * num_entries)))
