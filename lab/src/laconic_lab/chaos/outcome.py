"""What a fault led to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The promises that it broke, and whether it befell anyone at all."""

    broken: list[str] = field(default_factory=list)
    struck: bool = True
