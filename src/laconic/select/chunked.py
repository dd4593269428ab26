"""Top-k by chunks: the same share of every few thousand entries, so that no part of a tensor is passed over."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from laconic.errors import SchemeError
from laconic.kernels import withdraw_of_chunks_
from laconic.layout import Layout
from laconic.select.bucket_plan import BucketPlan, Chooser, Window, share_of


@dataclass(frozen=True, kw_only=True)
class ChunkedTopK(Chooser):
    """The k = max(1, round(rho*C)) largest |r| of each C entries of a parameter, ties to the lower position.

    Chunks are cut within parameters, so the result does not depend on how DDP cuts its buckets; the last chunk of a
    parameter, if it is shorter, sends its own share (after SparseLoCo, arXiv 2508.15706).
    """

    rho: float  # share of entries sent; smaller sends less
    chunk: int = 4096
    dense_below: int = 1000  # parameters with fewer entries go whole: choosing would cost more than it saves

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1:
            raise SchemeError(f"ChunkedTopK.rho is {self.rho}; give a share in (0, 1]")
        if self.chunk < 1:
            raise SchemeError(f"ChunkedTopK.chunk is {self.chunk}; give a number of entries, 1 or more")
        if self.dense_below < 0:
            raise SchemeError(f"ChunkedTopK.dense_below is {self.dense_below}; give a number of entries, 0 or more")

    @property
    def density(self) -> float:
        return self.rho

    @property
    def per_parameter(self) -> bool:
        return True

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        small = tuple(span for span in layout.spans if span.num_entries < self.dense_below)
        large = [span for span in layout.spans if span.num_entries >= max(1, self.dense_below)]
        windows = []
        for span in large:
            rest = span.stop - span.num_entries % self.chunk  # where a last, shorter chunk begins
            num_whole = (rest - span.start) // self.chunk
            windows.append(Window(span.start, rest, num_whole * share_of(self.chunk, density)))
            windows.append(Window(rest, span.stop, share_of(span.stop - rest, density)))
        return BucketPlan(layout.num_entries, fixed=small, windows=tuple(w for w in windows if w.start < w.stop))

    @property
    def withdraw_window_(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return partial(withdraw_of_chunks_, chunk=self.chunk)
