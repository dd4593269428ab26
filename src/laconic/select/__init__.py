"""Frozen answers to *what is sent*: which positions of a bucket go out at a step."""

from laconic.kernels import SEARCHES
from laconic.select.bucket_plan import BucketPlan, Chooser, Selector, SharedSelector
from laconic.select.overlap import SCORES, Overlap, Score
from laconic.select.shared import Everything, LowRank, RandK
from laconic.select.topk import BlockTopK, ChunkedTopK, TopK

SELECTORS: dict[str, type[Selector]] = {
    "everything": Everything,
    "topk": TopK,
    "chunked": ChunkedTopK,
    "blocks": BlockTopK,
    "overlap": Overlap,
    "randk": RandK,
    "low-rank": LowRank,
}
