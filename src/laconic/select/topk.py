"""Top-k: the entries that matter most now, of a bucket, a parameter or a chunk, one by one or in whole runs."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

from torch import Tensor

from laconic.errors import SchemeError, check_least, check_option, check_share
from laconic.kernels import SEARCHES, withdraw_of_chunks_, withdraw_runs_
from laconic.layout import Layout
from laconic.select.bucket_plan import BucketPlan, Chooser, Window, plan_of_bucket, plan_of_chunks, share_of
from laconic.wire import IndexBlock, Runs

_SCOPES = ("bucket", "parameter")


@dataclass(frozen=True)
class TopK(Chooser):
    """The k = max(1, round(rho*N)) largest |r| go, ties to the lower position (Aji and Heafield, EMNLP 2017).

    `per="bucket"` ranks a whole bucket at once; `per="parameter"` takes a share of each parameter, so that the result
    does not depend on how DDP cuts its buckets. `search` finds the k-th value: the result is the same by all,
    but for the order of ties; see kernels/searches.py.

    Example:
        >>> TopK(0.01) == laconic.recipes.topk(0.01).select
        True
    """

    rho: float = 0.0  # share of entries sent; smaller sends less
    _: KW_ONLY
    cover: float = 0.0  # c, instead of rho: k = c*N/M, so that each entry is sent by c workers on average
    per: str = "bucket"
    dense_below: int = 1000  # parameters with fewer entries go whole: selecting would cost more than it saves
    search: str = "threshold"
    tolerance: float = 0.25  # of search="bisection": it ends at no more than (1 + this)*k candidates

    def __post_init__(self) -> None:
        if not (self.cover and not self.rho):
            check_share(self, "rho")
        if self.cover < 0 or (self.cover and self.rho):
            name = type(self).__name__
            raise SchemeError(f"{name}.cover is {self.cover}; give a number above 0 and no rho, or rho alone")
        check_option(self, "per", _SCOPES)
        check_option(self, "search", SEARCHES)
        check_least(self, dense_below=0, tolerance=0)

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
        search_ = SEARCHES[self.search]
        return partial(search_, tolerance=self.tolerance) if self.search == "bisection" else search_


@dataclass(frozen=True)
class ChunkedTopK(Chooser):
    """The k = max(1, round(rho*C)) largest |r| of each C entries of a parameter go, ties to the lower position.

    Chunks are cut within parameters, so the result does not depend on how DDP cuts its buckets; the last chunk of a
    parameter, if it is shorter, sends its own share (after SparseLoCo, arXiv 2508.15706).

    Example:
        >>> ChunkedTopK(0.01).chunk
        4096
    """

    per_parameter = True

    rho: float  # share of entries sent; smaller sends less
    _: KW_ONLY
    chunk: int = 4096  # C, entries
    dense_below: int = 1000  # parameters with fewer entries go whole: selecting would cost more than it saves

    def __post_init__(self) -> None:
        check_share(self, "rho")
        check_least(self, chunk=1, dense_below=0)

    @property
    def density(self) -> float:
        return self.rho

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        def share(n: int) -> int:
            return n // self.chunk * share_of(self.chunk, density) if n >= self.chunk else share_of(n, density)

        return plan_of_chunks(layout, self.chunk, self.dense_below, share)

    @property
    def withdraw_window_(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return partial(withdraw_of_chunks_, chunk=self.chunk)


@dataclass(frozen=True)
class BlockTopK(Chooser):
    """The max(1, round(rho*N/B)) runs of B entries of a parameter with the largest sum(r^2) go, ties to the lower run.

    Runs are cut within parameters, so the result does not depend on how DDP cuts its buckets; the last run of a
    parameter, if it is shorter, goes at every step. A frame holds the numbers of runs, which take 1/B of the bits of
    positions. The pieces that go to servers do not end where runs do: there positions are written one by one.

    Example:
        >>> BlockTopK(0.01, 64).density
        0.01
    """

    per_parameter = True

    rho: float  # share of runs sent; smaller sends less
    block: int = 32  # B, entries
    _: KW_ONLY
    dense_below: int = 1000  # parameters with fewer entries go whole: selecting would cost more than it saves

    def __post_init__(self) -> None:
        check_share(self, "rho")
        check_least(self, block=1, dense_below=0)

    @property
    def density(self) -> float:
        return self.rho

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        def share(n: int) -> int:
            return self.block * share_of(n // self.block, density) if n >= self.block else n

        return plan_of_chunks(layout, self.block, self.dense_below, share)

    def index_code(self, plan: BucketPlan) -> IndexBlock | None:
        spans = tuple((window.start, window.stop) for window in plan.windows)
        num_selected = sum(-(-window.k // self.block) for window in plan.windows)
        return Runs(spans, self.block, num_selected).index_block if spans else None

    @property
    def withdraw_window_(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return partial(withdraw_runs_, length=self.block)
