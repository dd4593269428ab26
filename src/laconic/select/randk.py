"""Shared random k: positions that all workers draw alike, so that a network can add what lies there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import SchemeError
from laconic.kernels.draws import hash_64
from laconic.layout import Layout
from laconic.select.plan import Plan, Window

_MODES = ("independent", "cycle")


@dataclass(frozen=True, kw_only=True)
class RandK:
    """k = max(1, round(rho*N)) positions (start + stride*t) mod N, stride prime to N (this way of drawing is ours).

    `mode="independent"` draws start and stride anew from (seed, step): each entry goes with probability k/N, whatever
    went before. `mode="cycle"` draws them once for ceil(N/k) steps and walks on in between, so that every entry goes
    once (the last turn fills up with some that went before). Either costs k operations, not a permutation of N.
    """

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
    def density(self) -> float:
        return self.rho

    def density_among(self, num_workers: int) -> float:
        return self.density

    def plan(self, layout: Layout, density: float) -> Plan:
        small = tuple(span for span in layout.spans if span.num_entries < self.dense_below)
        num_large = layout.num_entries - sum(span.num_entries for span in small)
        windows = [Window(0, layout.num_entries, _share(num_large, density))] if num_large else []
        return Plan(layout.num_entries, fixed=small, windows=tuple(windows))

    def positions(self, plan: Plan, step: int, bucket: int, device: torch.device) -> Tensor:
        """The plan.k positions of this step, int64, each once, in the order of the draw."""
        num_large = plan.num_entries - plan.num_fixed
        if num_large == 0:
            return torch.empty(0, dtype=torch.int64, device=device)
        num_turns = -(-num_large // plan.k) if self.mode == "cycle" else 1
        cycle, turn = divmod(step, num_turns)
        draw = hash_64(self.seed, bucket, cycle)
        start, stride = draw % num_large, _prime_to(num_large, draw >> 32)
        first = min(turn * plan.k, num_large - plan.k)
        walk = torch.arange(first, first + plan.k, device=device)
        return _skip_fixed((walk * stride + start) % num_large, plan)  # under 2^62 for a bucket under 2^31


def _share(num_entries: int, density: float) -> int:
    return min(num_entries, max(1, round(density * num_entries)))


def _prime_to(n: int, draw: int) -> int:
    """A number in the middle half of [0, n) that has no divisor in common with n: its multiples visit all of them."""
    stride = n // 4 + draw % (n // 2 + 1)
    while math.gcd(stride, n) != 1:
        stride += 1
    return stride


def _skip_fixed(rank: Tensor, plan: Plan) -> Tensor:
    """The position of the rank-th entry (from 0) outside the plan's fixed spans."""
    if not plan.fixed:
        return rank
    before = torch.tensor([span.num_entries for span in plan.fixed], device=rank.device).cumsum(0)
    # The ranks from which on one more fixed span lies before an entry.
    turns = torch.tensor([span.stop for span in plan.fixed], device=rank.device) - before
    passed = torch.searchsorted(turns, rank, right=True)
    return rank + torch.cat([before.new_zeros(1), before])[passed]
