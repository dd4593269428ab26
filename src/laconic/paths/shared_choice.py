"""What all workers take alike: every entry, or this step's draw of positions that they share."""

import torch
from torch import Tensor

from laconic.layout import Layout, positions_of
from laconic.paths.path import Taken, Work
from laconic.select import BucketPlan, SharedSelector


class SharedChoice:
    """Takes the values at positions that a network can add up, and writes sums there."""

    def __init__(self, select: SharedSelector, *, keeps: bool) -> None:
        self._select = select
        self.keeps = keeps  # whether what is not sent is kept; where it is not, a gain makes the mean true
        self._plans: dict[tuple[Layout, float], tuple[BucketPlan, Tensor]] = {}

    def count(self, layout: Layout, num_workers: int) -> int:
        """The entries of a bucket that go among M workers once the trigger has reached its target."""
        plan = self._select.plan(layout, self._select.density_among(num_workers))
        return plan.num_fixed + plan.k

    def take_(self, work: Work) -> Tensor:
        """Deposit the gradient and take out what is sent; NaN for all of it, and no deposit, if it is not finite."""
        plan, fixed = self._plan(work)
        if not work.finite:
            return torch.full((plan.num_fixed + plan.k,), torch.nan, dtype=torch.float32, device=work.device)
        positions = None
        if plan.k:
            drawn = self._select.positions(plan, work.step, work.number, work.device)
            positions = torch.cat([fixed, drawn])
        work.account.deposit_(work.flat, 1 / work.scale)
        work.taken = Taken(positions, plan.num_fixed, work.account.withdraw_(positions))
        return work.taken.values

    def write_(self, work: Work, mean: Tensor) -> None:
        """Overwrite the bucket with the mean where something was sent, and with zeros elsewhere."""
        positions = work.taken.positions if work.taken is not None else None  # of a dense step, said too late
        if positions is None:
            work.flat.copy_(mean)
            return
        plan, _ = self._plan(work)
        if not self.keeps:
            mean[plan.num_fixed :].mul_((plan.num_entries - plan.num_fixed) / plan.k)
        work.flat.zero_()
        work.flat[positions] = mean.to(work.flat.dtype)

    def _plan(self, work: Work) -> tuple[BucketPlan, Tensor]:
        key = work.layout, work.density
        if key not in self._plans:
            plan = self._select.plan(*key)
            fixed = positions_of(plan.fixed if plan.k else (), work.device)
            self._plans[key] = plan, fixed
        return self._plans[key]
