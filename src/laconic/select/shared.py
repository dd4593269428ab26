"""Selectors whose positions all workers know beforehand, so that a network can add what lies there."""

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import SchemeError, check_least, check_option
from laconic.layout import Layout, Span, positions_of
from laconic.select.bucket_plan import BucketPlan, Chooser, Selector, SharedSelector, Window, plan_of_bucket

_MODES = ("independent", "cycle")
_FORMS = ("both", "alternating")


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
    """The same k = max(1, round(rho*N)) random positions go on every worker, all sets of them alike; or k as given.

    They are the first k images of a permutation drawn by (seed, bucket, step), without state (kernels.draw_distinct_).
    `mode="independent"` draws it anew at each step: each entry goes with probability k/N, whatever went before.
    `mode="cycle"` draws it once for ceil(N/k) steps and takes the next k images in each: every entry goes once, or
    twice where N/k is no whole number.

    Example:
        >>> RandK(0.1, mode="cycle").density
        0.1
    """

    is_shared = True

    rho: float = 0.0  # share of entries sent; smaller sends less
    _: KW_ONLY
    k: int = 0  # instead of rho: entries of each bucket
    mode: str = "independent"
    dense_below: int = 1000  # parameters with fewer entries go whole: they are few and matter much
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1 and not (self.k and not self.rho):
            raise SchemeError(f"RandK.rho is {self.rho}; give a share in (0, 1), or k alone, or use Everything()")
        if self.k and self.rho:
            raise SchemeError(f"RandK has rho={self.rho} and k={self.k}; give one")
        check_option(self, "mode", _MODES)
        check_least(self, k=0, dense_below=0, seed=0)

    @property
    def takes_turns(self) -> bool:
        return self.mode == "cycle"

    @property
    def density(self) -> float:
        return self.rho or 0.5  # less than everything: how much less, the buckets decide

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        plan = plan_of_bucket(layout, density, self.dense_below)
        if not self.k or density == 1:
            return plan
        num_large = plan.num_entries - plan.num_fixed
        return replace(plan, windows=tuple(replace(window, k=min(self.k, num_large)) for window in plan.windows))

    def positions(self, plan: BucketPlan, step: int, bucket: int, device: torch.device) -> Tensor:
        num_large = plan.num_entries - plan.num_fixed
        if num_large == 0:
            return positions_of((), device)
        num_turns = -(-num_large // plan.k) if self.mode == "cycle" else 1
        cycle, turn = divmod(step, num_turns)
        drawn = torch.empty(plan.k, dtype=torch.int64)
        kernels.draw_distinct_(drawn, num_large, turn * plan.k, kernels.key_of(self.seed, bucket, cycle))
        return kernels.to_device(_after_fixed(plan, drawn.numpy()), device)


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


def _after_fixed(plan: BucketPlan, ranks: np.ndarray) -> Tensor:
    """Positions in the bucket of entries of these ascending ranks among those that do not go whole.

    A span that goes whole lies before all entries of rank r or more, where r is what lies before it of the others.
    """
    before = np.cumsum([0, *(span.num_entries for span in plan.fixed)])
    first = np.searchsorted(ranks, [span.start - of for span, of in zip(plan.fixed, before[:-1], strict=True)])
    return torch.from_numpy(ranks + np.repeat(before, np.diff([0, *first, len(ranks)])))
