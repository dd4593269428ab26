"""Exact top-k: the entries that matter most now."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from laconic.errors import SchemeError
from laconic.kernels import SEARCHES
from laconic.layout import Layout
from laconic.select.bucket_plan import BucketPlan, Chooser, Window, plan_of_bucket, share_of

_SCOPES = ("bucket", "parameter")


@dataclass(frozen=True, kw_only=True)
class TopK(Chooser):
    """The k = max(1, round(rho*N)) largest |r|, ties to the lower position (Aji and Heafield, EMNLP 2017).

    `per="bucket"` ranks a whole bucket at once; `per="parameter"` takes a share of each parameter, so that the result
    does not depend on how DDP cuts its buckets. `search` is the way to the k-th value: the result is the same by all,
    but for the order of ties; see kernels/searches.py.
    """

    rho: float = 0.0  # share of entries sent; smaller sends less
    cover: float = 0.0  # c, instead of rho: k = c*N/M, so that each entry is sent by c workers on average
    per: str = "bucket"
    dense_below: int = 1000  # parameters with fewer entries go whole: choosing would cost more than it saves
    search: str = "threshold"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not (self.cover and not self.rho) and not 0 < self.rho <= 1:
            raise SchemeError(f"{name}.rho is {self.rho}; give a share in (0, 1]")
        if self.cover < 0 or (self.cover and self.rho):
            raise SchemeError(f"{name}.cover is {self.cover}; give a number above 0 and no rho, or rho alone")
        if self.per not in _SCOPES:
            raise SchemeError(f"{name}.per is {self.per!r}; give one of {', '.join(_SCOPES)}")
        if self.search not in SEARCHES:
            raise SchemeError(f"{name}.search is {self.search!r}; give one of {', '.join(SEARCHES)}")
        if self.dense_below < 0:
            raise SchemeError(f"{name}.dense_below is {self.dense_below}; give a number of entries, 0 or more")

    @property
    def density(self) -> float:
        return self.density_among(2)  # the fewest there can be

    @property
    def per_parameter(self) -> bool:
        return self.per == "parameter"

    def density_among(self, num_workers: int) -> float:
        return self.rho or min(1.0, self.cover / num_workers)

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        plan = plan_of_bucket(layout, density, self.dense_below)
        if not self.per_parameter:
            return plan
        large = [span for span in layout.spans if span.num_entries >= max(1, self.dense_below)]
        windows = [Window(span.start, span.stop, share_of(span.num_entries, density)) for span in large]
        return replace(plan, windows=tuple(windows))

    @property
    def asks_host(self) -> bool:
        return self.search != "threshold"

    @property
    def withdraw_window_(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return SEARCHES[self.search]
