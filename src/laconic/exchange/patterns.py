"""The frozen answer to *where it goes*: who hears what a worker sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One way for all workers to hear of each other."""

    adds_in_flight: ClassVar[bool] = False  # the network sums, so all workers must send the same positions


@dataclass(frozen=True, kw_only=True)
class AllReduce(Pattern):
    """The network adds position by position; 2*(M-1)/M of the data leaves each worker, whatever M is."""

    adds_in_flight: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class AllGather(Pattern):
    """Everyone gets everyone's frame and adds by itself; M-1 frames leave each worker."""


@dataclass(frozen=True, kw_only=True)
class Silent(Pattern):
    """Nothing is sent and every worker keeps its own gradient: the upper bound on speed, not a way to train."""
