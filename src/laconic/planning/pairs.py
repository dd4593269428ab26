"""What a plan knows of the links between two ranks; attach/pairs.py measures them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PairLink:
    """What one rank sends to another."""

    source: int
    target: int
    latency_s: float  # half of the round trip of 8 bytes
    bytes_per_s: float  # of the longest message that there was time for
    settled: bool = True  # whether it was long enough for TCP; else the link may carry more
