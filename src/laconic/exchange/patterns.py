"""The frozen answer to *where it goes*: who hears what a worker sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.errors import SchemeError


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
class Silent(Pattern):
    """Nothing is sent and every worker keeps its own gradient: the upper bound on speed, not a way to train."""
