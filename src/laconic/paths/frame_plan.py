"""What is known about the frames of one bucket beforehand, and what remembers from step to step where to look."""

import torch
from torch import Tensor

from laconic import kernels
from laconic.layout import Layout, positions_of
from laconic.memory import Due
from laconic.paths.path import Work
from laconic.quantize import Quantizer
from laconic.select import BucketPlan, Chooser
from laconic.wire import EliasFano, FrameShape


class FramePlan:
    """A selector's plan for one bucket at one density, made once."""

    def __init__(
        self, select: Chooser, quantize: Quantizer, layout: Layout, density: float, device: torch.device
    ) -> None:
        self._select = select
        self.plan = select.plan(layout, density)
        self.shape = FrameShape(self.plan.num_entries, self.plan.k, self.plan.num_fixed, quantize)
        self.fixed = positions_of(self.plan.fixed, device)
        self.searches = [
            kernels.new_search(window.stop - window.start, window.k, device) for window in self.plan.windows
        ]

    @property
    def num_fixed(self) -> int:
        """The entries that go at every step."""
        return self.plan.num_fixed

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can write and read its frames: that asks nothing of the host."""
        return self.shape.index.codec is EliasFano

    def positions(self, chosen: Tensor) -> Tensor | None:
        """The fixed and the chosen ones; None for every entry."""
        if self.num_fixed == self.plan.num_entries:
            return None
        return torch.cat([self.fixed, chosen]) if self.num_fixed else chosen.to(torch.int64)

    def withdraw_(self, balance: Tensor, due: Due) -> tuple[Tensor, Tensor]:
        """balance += due; take the fixed and the chosen entries out: (chosen positions, fixed and chosen values)."""
        addend, factor = due
        if self.num_fixed == self.plan.num_entries:  # in order, and 1.2 M indices would take 20 ms
            whole = balance.clone() if addend is None else balance.add(addend, alpha=factor)
            balance.zero_()
            return self.fixed[:0].to(torch.int32), whole
        if not self.num_fixed:
            return self._select.withdraw_(balance, addend, factor, self.plan, self.searches)
        owed = due.at(self.fixed)
        whole = balance.index_select(0, self.fixed).add_(owed)
        balance.index_copy_(0, self.fixed, -owed)  # the addition leaves zeros there, so that they are not chosen
        chosen, values = self._select.withdraw_(balance, addend, factor, self.plan, self.searches)
        balance.index_fill_(0, self.fixed, 0)
        return chosen, torch.cat([whole, values])

    def add_up_(self, flat: Tensor, positions: Tensor, values: Tensor, factor: float) -> None:
        """flat = factor * the sum of what everyone sent, in rank order, so that all workers get the same bits."""
        total = flat.zero_() if flat.dtype == torch.float32 else torch.zeros_like(flat, dtype=torch.float32)
        whole, chosen = values.mul_(factor).tensor_split([self.num_fixed], dim=1)
        if self.num_fixed:
            total[self.fixed] = sum(whole)  # from zero on, row by row
        kernels.add_at_(total, list(positions), list(chosen))
        if total is not flat:
            flat.copy_(total)


class FramePlans:
    """The plans of all buckets."""

    def __init__(self, select: Chooser, quantize: Quantizer) -> None:
        self._select = select
        self._quantize = quantize
        self._plans: dict[tuple[Layout, float], FramePlan] = {}

    def of(self, work: Work) -> FramePlan:
        """That of a bucket at this step's density."""
        key = work.layout, work.density
        if key not in self._plans:
            self._plans[key] = FramePlan(self._select, self._quantize, *key, work.device)
        return self._plans[key]

    def target(self, layout: Layout, num_workers: int) -> BucketPlan:
        """What goes of a bucket among M workers once the trigger has reached its target."""
        return self._select.plan(layout, self._select.density_among(num_workers))

    def passes(self) -> float | None:
        """How often a selection went over its entries, on average; 1 is the least."""
        searches = [search.tolist() for plan in self._plans.values() for search in plan.searches]
        calls = sum(search[kernels.CALLS] for search in searches)
        return sum(search[kernels.PASSES] for search in searches) / calls if calls else None
