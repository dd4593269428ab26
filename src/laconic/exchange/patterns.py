"""The frozen answer to *where it goes*: who hears what a worker sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.errors import SchemeError

_COMBINES = ("mean", "majority", "weighted")


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One way for all workers to hear of each other."""

    adds_in_flight: ClassVar[bool] = False  # the network sums, so all workers must send the same positions


@dataclass(frozen=True, kw_only=True)
class AllReduce(Pattern):
    """The network adds position by position; 2*(M-1)/M of the data leaves each worker, whatever M is.

    Integer codes may also be added in two stages: each worker gets everyone's codes for its share of the positions,
    adds them, rounds the mean to a code again without bias, and sends that to all. Codes stay as narrow as one's own.
    """

    adds_in_flight: ClassVar[bool] = True

    stages: int = 0  # 1: the network adds; 2: the workers do; 0: whichever the size formula says

    def __post_init__(self) -> None:
        if self.stages not in (0, 1, 2):
            raise SchemeError(f"AllReduce.stages is {self.stages}; give 1, 2, or 0 to let the size decide")


@dataclass(frozen=True, kw_only=True)
class AllGather(Pattern):
    """Everyone gets everyone's frame and adds by itself; M-1 frames leave each worker."""


@dataclass(frozen=True, kw_only=True)
class Server(Pattern):
    """Each entry has an owner, who adds up or takes a vote of what the workers send of it, and answers all of them.

    The owners are the workers themselves, each for its share of every bucket, or ranks that hold no data and serve
    (`laconic.serve`); a scheme is the same either way. An answer takes the smallest form: sparse, bitmap or dense.
    """

    combine: str = "mean"  # or "majority": the sign of the sum of signs; or "weighted": by each worker's record
    down_rho: float = 0.0  # the largest share of entries an answer holds, the rest waiting with its owner; 0: no limit

    def __post_init__(self) -> None:
        if self.combine not in _COMBINES:
            raise SchemeError(f"Server.combine is {self.combine!r}; give one of {', '.join(_COMBINES)}")
        if not 0 <= self.down_rho <= 1:
            raise SchemeError(f"Server.down_rho is {self.down_rho}; give a share in (0, 1], or 0 for no limit")
        if self.down_rho and self.votes:
            raise SchemeError("a vote has no size, so none is smaller than another; leave Server.down_rho out")

    @property
    def votes(self) -> bool:
        """Whether answers are signs."""
        return self.combine != "mean"


@dataclass(frozen=True, kw_only=True)
class Silent(Pattern):
    """Nothing is sent and every worker keeps its own gradient: the upper bound on speed, not a way to train."""
