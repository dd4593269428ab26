"""Max-norm levels: one grid for a bucket, or for each block of it."""

from dataclasses import dataclass

from laconic.quantize.grid import Grid


@dataclass(frozen=True, kw_only=True)
class MaxNorm(Grid):
    """The grid n/s * {-s, ..., s} (Vineeth S, arXiv 2109.12497); blocks with a norm of their own are ours.

    The variance of the mean is at most n^2*N/(4*s^2*M), so a block whose entries are all small gains by its own n.
    """
