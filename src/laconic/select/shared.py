"""Selectors whose positions all workers know beforehand, so that a network can add what lies there."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.errors import SchemeError, check_least, check_option
from laconic.kernels import hash_64
from laconic.layout import Layout, Span, positions_of
from laconic.select.bucket_plan import BucketPlan, Chooser, Selector, SharedSelector, Window, plan_of_bucket

_MODES = ("independent", "cycle")
_FORMS = ("both", "alternating")
_FEW = 4096  # draws that take numpy less time than a dozen operations of torch, or of a GPU, take to begin; n*k < 2^53


@dataclass(frozen=True)
class Everything(SharedSelector, Chooser):
    """All entries go, at every step: x = r."""

    is_shared = True
    sends_all = True
    dense_below = 0
    density = 1.0

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        return BucketPlan(layout.num_entries, fixed=layout.spans, windows=())

    def positions(self, plan: BucketPlan, step: int, bucket: int, device: torch.device) -> Tensor:
        return positions_of((), device)


@dataclass(frozen=True)
class RandK(SharedSelector):
    """The k = max(1, round(rho*N)) positions floor((t*N + r) / k), t = 0..k-1, of one drawn r in [0, N) go.

    Each entry is in k of the N draws (systematic sampling, Madow and Madow 1944; its use here is ours).
    `mode="independent"` draws r anew from (seed, step): each entry goes with probability k/N, whatever went before.
    `mode="cycle"` draws it once for ceil(N/k) steps and goes on with r + k, which moves each position on by one: every
    entry goes once, or twice where N/k is no whole number. Either costs k operations and walks memory in order.

    Example:
        >>> RandK(0.1, mode="cycle").density
        0.1
    """

    is_shared = True

    rho: float  # share of entries sent; smaller sends less
    _: KW_ONLY
    mode: str = "independent"
    dense_below: int = 1000  # parameters with fewer entries go whole: they are few and matter much
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1:
            raise SchemeError(f"RandK.rho is {self.rho}; give a share in (0, 1), or use Everything()")
        check_option(self, "mode", _MODES)
        check_least(self, dense_below=0, seed=0)

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


@dataclass(frozen=True)
class LowRank(Selector):
    """Two thin factors of each matrix go: M' = P Q^T, P with `rank` columns, by one subspace iteration a step.

    `form="both"` sends P = M Q, then Q = M^T P of the orthonormal P (PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS
    2019); `form="alternating"` sends P on even steps and Q on odd ones, each by the orthonormal other one of the step
    before: one message and half of the numbers (ACP-SGD: Zhang et al., ICDCS 2023). A parameter of two or more
    dimensions is the matrix out x rest; vectors, and matrices that two factors would not make smaller, go whole.

    Example:
        >>> LowRank(2).form
        'both'
    """

    is_shared = True
    sends_all = False
    factors = True
    per_parameter = True
    density = 0.5  # less than everything: how much less, the shapes decide

    rank: int = 4  # columns of each factor
    _: KW_ONLY
    form: str = "both"
    dense_below: int = 1000  # parameters with fewer entries go whole: they are few and matter much
    seed: int = 0  # of the first bases, which are drawn

    def __post_init__(self) -> None:
        check_option(self, "form", _FORMS)
        check_least(self, rank=1, dense_below=0, seed=0)

    @property
    def takes_turns(self) -> bool:
        return self.form == "alternating"

    def is_factored(self, span: Span) -> bool:
        """Whether a parameter is a matrix that goes as factors, in fewer numbers than it has."""
        is_matrix = len(span.shape) > 1 and span.num_entries >= max(1, self.dense_below)
        return is_matrix and self._num_factors(span) < span.num_entries

    def _num_factors(self, span: Span) -> int:
        return self.rank * (span.shape[0] + span.num_entries // span.shape[0])

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        """The plan of what goes whole, and of windows that the numbers of two factors stand for."""
        whole = tuple(span for span in layout.spans if not self.is_factored(span))
        matrices = [span for span in layout.spans if self.is_factored(span)]
        windows = tuple(Window(span.start, span.stop, self._num_factors(span)) for span in matrices)
        return BucketPlan(layout.num_entries, fixed=whole, windows=windows)


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
