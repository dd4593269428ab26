"""Send everything: the dense schemes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.layout import Layout
from laconic.select.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Everything:
    """Every entry, every time."""

    @property
    def density(self) -> float:
        return 1.0

    def plan(self, layout: Layout, density: float) -> Plan:
        return Plan(layout.num_entries, fixed=layout.spans, windows=())

    def choose(self, balance: Tensor, plan: Plan) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=balance.device)
