"""Low rank: of each matrix two thin factors, whose product stands for it."""

from dataclasses import dataclass

from laconic.errors import SchemeError
from laconic.layout import Layout, Span
from laconic.select.bucket_plan import BucketPlan, Selector, Window

_FORMS = ("both", "alternating")


@dataclass(frozen=True, kw_only=True)
class LowRank(Selector):
    """M' = P Q^T, P with `rank` columns, found by one round of subspace iteration a step.

    `form="both"` sends P = M Q, then Q = M^T P of the orthonormal P (PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS
    2019); `form="alternating"` sends P on even steps and Q on odd ones, each by the orthonormal other one of the step
    before: one message and half of the numbers (ACP-SGD: Zhang et al., ICDCS 2023). A parameter of two or more
    dimensions is the matrix out x rest; vectors, and matrices that two factors would not make smaller, go whole.
    """

    is_shared = True
    sends_all = False
    factors = True

    rank: int = 4
    form: str = "both"
    dense_below: int = 1000  # parameters with fewer entries go whole: they are few and matter much
    seed: int = 0  # of the first bases, which are drawn

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SchemeError(f"LowRank.rank is {self.rank}; give 1 or more")
        if self.form not in _FORMS:
            raise SchemeError(f"LowRank.form is {self.form!r}; give one of {', '.join(_FORMS)}")
        if self.dense_below < 0:
            raise SchemeError(f"LowRank.dense_below is {self.dense_below}; give a number of entries, 0 or more")
        if self.seed < 0:
            raise SchemeError(f"LowRank.seed is {self.seed}; give 0 or more")

    @property
    def density(self) -> float:
        return 0.5  # less than everything: how much less, the shapes alone say

    @property
    def takes_turns(self) -> bool:
        return self.form == "alternating"

    @property
    def per_parameter(self) -> bool:
        return True

    def is_factored(self, span: Span) -> bool:
        """Whether a parameter is a matrix that goes as factors, which is to say as fewer numbers than it has."""
        is_matrix = len(span.shape) > 1 and span.num_entries >= max(1, self.dense_below)
        return is_matrix and self._num_factors(span) < span.num_entries

    def _num_factors(self, span: Span) -> int:
        """The numbers in both factors of a matrix."""
        return self.rank * (span.shape[0] + span.num_entries // span.shape[0])

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        """What goes whole, and windows for which the numbers of two factors stand, whatever the density."""
        whole = tuple(span for span in layout.spans if not self.is_factored(span))
        matrices = [span for span in layout.spans if self.is_factored(span)]
        windows = tuple(Window(span.start, span.stop, self._num_factors(span)) for span in matrices)
        return BucketPlan(layout.num_entries, fixed=whole, windows=windows)
