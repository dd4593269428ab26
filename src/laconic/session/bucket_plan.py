"""What is known about the frames of one bucket beforehand, and what remembers from step to step where to look."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic import kernels
from laconic.layout import Layout, positions_of
from laconic.memory import Due
from laconic.scheme import Scheme
from laconic.wire import Contents, FrameShape


class BucketPlan:
    """A scheme's plan for one bucket at one density, made once."""

    def __init__(self, scheme: Scheme, layout: Layout, density: float, device: torch.device) -> None:
        self._select, quantize = scheme.frame_answers
        self.plan = self._select.plan(layout, density)
        self.shape = FrameShape(self.plan.num_entries, self.plan.k, self.plan.num_fixed, quantize)
        self.fixed = positions_of(self.plan.fixed, device)
        self.searches = [
            kernels.new_search(window.stop - window.start, window.k, device) for window in self.plan.windows
        ]

    def withdraw_(self, balance: Tensor, due: Due) -> tuple[Tensor, Tensor]:
        """balance += due; take the fixed and the chosen entries out: (chosen positions, fixed and chosen values)."""
        addend, factor = due
        if self.plan.num_fixed == self.plan.num_entries:  # in order, and 1.2 M indices would take 20 ms
            whole = balance.clone() if addend is None else balance.add(addend, alpha=factor)
            balance.zero_()
            return self.fixed[:0].to(torch.int32), whole
        owed = due.at(self.fixed)
        whole = balance.index_select(0, self.fixed).add_(owed)
        balance.index_copy_(0, self.fixed, -owed)  # the addition leaves zeros there, so that they are not chosen
        chosen, values = self._select.withdraw_(balance, addend, factor, self.plan, self.searches)
        balance.index_fill_(0, self.fixed, 0)
        return chosen, torch.cat([whole, values])

    def withdraw_at_(self, balance: Tensor, due: Due, chosen: Tensor) -> Tensor:
        """balance += due; take the fixed entries and those at `chosen` out: the values of both."""
        addend, factor = due
        if addend is not None:
            balance.add_(addend, alpha=factor)
        at = torch.cat([self.fixed, chosen])
        values = balance.index_select(0, at)
        balance.index_fill_(0, at, 0)
        return values

    def add_up_(self, flat: Tensor, heard: Sequence[Contents], factor: float) -> None:
        """flat = factor * the sum of what everyone sent, in rank order, so that all workers get the same bits."""
        total = flat.zero_() if flat.dtype == torch.float32 else torch.zeros_like(flat, dtype=torch.float32)
        # One copy to the device for all frames: each waits for what runs there.
        positions = torch.cat([contents.positions for contents in heard]).to(flat.device)
        values = torch.cat([contents.values for contents in heard]).to(flat.device).mul_(factor)
        sizes = [self.plan.num_fixed, self.plan.k]
        whole, chosen = torch.split(values.view(len(heard), sum(sizes)), sizes, dim=1)
        total[self.fixed] = sum(whole)  # from zero on, row by row
        kernels.add_at_(total, list(positions.view(chosen.shape)), list(chosen))
        if total is not flat:
            flat.copy_(total)
