"""What is sent: which positions of a bucket go out this step."""

from laconic.kernels import SEARCHES
from laconic.select.bucket_plan import BucketPlan, Chooser, Selector, SharedSelector
from laconic.select.chunked import ChunkedTopK
from laconic.select.everything import Everything
from laconic.select.low_rank import LowRank
from laconic.select.overlap import Overlap
from laconic.select.randk import RandK
from laconic.select.scores import SCORES
from laconic.select.topk import TopK

SELECTORS: dict[str, type[Selector]] = {
    "everything": Everything,
    "topk": TopK,
    "chunked": ChunkedTopK,
    "overlap": Overlap,
    "randk": RandK,
    "low-rank": LowRank,
}
