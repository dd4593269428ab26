"""One thing that is slow or wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What was found, where, and what to do about it."""

    name: str  # of the check
    host: str
    measured: str
    expected: str
    cure: str
