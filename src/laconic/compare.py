"""The same job under several schemes, held side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic import records

_MARGIN = 0.01  # the default target lies one point under the reference's final accuracy


@dataclass(frozen=True)
class Row:
    """One scheme's figures beside the others'."""

    scheme: str
    accuracy: float
    seconds_to_target: float | None  # training time until an evaluation reached the target; None if none did
    step_ms: float
    split_ms: dict[str, float]
    bytes_out: int  # per worker and step
    bytes_in: int
    ratio: float | None
    speedup: float | None  # of time to target, against dense
    speedup_bf16: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """All rows, and the accuracy they were timed to."""

    target: float
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"target": self.target, "rows": [row.as_dict() for row in self.rows]}


def folder_of(out: Path, scheme: str) -> Path:
    """Where a scheme's records lie within a comparison's folder."""
    return out / re.sub(r"[^\w.=-]+", "_", scheme)


def compare(out: Path, schemes: Sequence[str], target: float | None = None) -> Comparison:
    """Read the records of every scheme and hold them side by side; schemes are named as they print."""
    results = {scheme: next(records.read(folder_of(out, scheme), "result")) for scheme in schemes}
    if target is None:
        reference = results.get("dense") or max(results.values(), key=lambda result: result["accuracy"])
        target = reference["accuracy"] - _MARGIN
    times = {scheme: _seconds_to(folder_of(out, scheme), target) for scheme in schemes}
    rows = [
        Row(
            scheme=scheme,
            accuracy=result["accuracy"],
            seconds_to_target=times[scheme],
            step_ms=result["step_ms"],
            split_ms=result["split_ms"],
            bytes_out=round(result["bytes_out"] / result["steps"]),
            bytes_in=round(result["bytes_in"] / result["steps"]),
            ratio=result["ratio"],
            speedup=_quotient(times.get("dense"), times[scheme]),
            speedup_bf16=_quotient(times.get("bf16"), times[scheme]),
        )
        for scheme, result in results.items()
    ]
    return Comparison(target, tuple(rows))


def _seconds_to(folder: Path, target: float) -> float | None:
    for fact in records.read(folder, "eval"):
        if fact["accuracy"] >= target:
            return float(fact["seconds"])
    return None


def _quotient(reference: float | None, here: float | None) -> float | None:
    return reference / here if reference is not None and here else None
