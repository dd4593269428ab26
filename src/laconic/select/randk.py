"""Shared random k: positions that all workers draw alike, so that a network can add what lies there."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.errors import SchemeError
from laconic.kernels import hash_64
from laconic.layout import Layout, positions_of
from laconic.select.bucket_plan import BucketPlan, SharedSelector, plan_of_bucket

_MODES = ("independent", "cycle")
_FEW = 4096  # draws that take numpy less time than a dozen operations of torch, or of a GPU, take to begin; n*k < 2^53


@dataclass(frozen=True, kw_only=True)
class RandK(SharedSelector):
    """k = max(1, round(rho*N)) positions floor((t*N + r) / k), t = 0..k-1, of one drawn r in [0, N): evenly spread.

    Each entry is in k of the N draws (systematic sampling, Madow and Madow 1944; its use here is ours).
    `mode="independent"` draws r anew from (seed, step): each entry goes with probability k/N, whatever went before.
    `mode="cycle"` draws it once for ceil(N/k) steps and goes on with r + k, which moves each position on by one: every
    entry goes once, or twice where N/k is no whole number. Either costs k operations and walks memory in order.
    """

    is_shared = True

    rho: float  # share of entries sent; smaller sends less
    mode: str = "independent"
    dense_below: int = 1000  # parameters with fewer entries go whole: they are few and matter much
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1:
            raise SchemeError(f"RandK.rho is {self.rho}; give a share in (0, 1), or use Everything()")
        if self.mode not in _MODES:
            raise SchemeError(f"RandK.mode is {self.mode!r}; give one of {', '.join(_MODES)}")
        if self.dense_below < 0:
            raise SchemeError(f"RandK.dense_below is {self.dense_below}; give a number of entries, 0 or more")
        if self.seed < 0:
            raise SchemeError(f"RandK.seed is {self.seed}; give 0 or more")

    @property
    def takes_turns(self) -> bool:
        return self.mode == "cycle"

    @property
    def density(self) -> float:
        return self.rho

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        return plan_of_bucket(layout, density, self.dense_below)

    def positions(self, plan: BucketPlan, step: int, bucket: int, device: torch.device) -> Tensor:
        num_large = plan.num_entries - plan.num_fixed
        if num_large == 0:
            return positions_of((), device)
        num_turns = -(-num_large // plan.k) if self.mode == "cycle" else 1
        cycle, turn = divmod(step, num_turns)
        first = (hash_64(self.seed, bucket, cycle) + turn * plan.k) % num_large
        before, draws = _fixed_before(plan, num_large, first)
        if plan.k <= _FEW:
            drawn = ((np.arange(plan.k) * float(num_large) + first) / plan.k).astype(np.int64)
            return torch.from_numpy(drawn + np.repeat(before, draws)).to(device)
        rank = _spread(num_large, plan.k, first, device)
        if not plan.fixed:
            return rank
        sizes, counts = (torch.from_numpy(each).to(device) for each in (before, draws))
        return rank.add_(sizes.repeat_interleave(counts, output_size=plan.k))


def _spread(n: int, k: int, first: int, device: torch.device) -> Tensor:
    """floor((t*n + first) / k) for t = 0..k-1, int64.

    While n*k < 2^53 a float64 quotient never reaches the next whole number by rounding, and takes a fifth of the time
    of a division of integers; those stay under 2^62 for a bucket under 2^31.
    """
    if n * k < 1 << 53:
        t = torch.arange(k, dtype=torch.float64, device=device)
        return t.mul_(n).add_(first).div_(k).to(torch.int64)
    return torch.div(torch.arange(k, device=device) * n + first, k, rounding_mode="trunc")


def _fixed_before(plan: BucketPlan, n: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of fixed entries that lie before drawn ones, and how many draws in a row have each before them.

    A fixed span lies before all entries of rank r or more among the n others; those of lower rank are the draws with
    (t*n + first) / k < r. So no device is asked what was drawn.
    """
    before = [0]
    drawn = [0]
    for span in plan.fixed:
        rank = span.start - before[-1]
        before.append(before[-1] + span.num_entries)
        drawn.append(min(plan.k, max(0, -((first - rank * plan.k) // n))))
    return np.array(before), np.diff([*drawn, plan.k])
