"""The records of an inspection, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from laconic_lab import records
from laconic_lab.errors import TaskError
from laconic_lab.figures import pick

_HEAD = "inspection"  # the record that comes first


@dataclass(frozen=True)
class Inspection:
    """What was run."""

    task: str
    model: str | None
    scheme: str
    workers: int
    steps: int
    batch: int
    seed: int
    rho: float


@dataclass(frozen=True)
class Fit:
    """One tensor at one step; layer is None for the whole model as one vector."""

    step: int
    of: str
    layer: str | None
    entries: int
    zeros: int
    mean_abs: float
    rms: float
    w1_laplace: float | None
    w1_gaussian: float | None
    closer: str | None
    k: int
    threshold_ratio: float | None
    caught_ratio: float | None
    tail: list[tuple[float, float]]

    @property
    def name(self) -> str:
        return "the whole model as one vector" if self.layer is None else self.layer


def holds_inspection(folder: Path) -> bool:
    """Whether the records are those of `laconic inspect`."""
    return next(records.read(folder, _HEAD), None) is not None


def read_inspection(folder: Path) -> tuple[Inspection, list[Fit]]:
    """What was run, and every tensor that was looked at."""
    fits = [Fit(**pick(Fit, fact, "fit")) for fact in records.read(folder, "fit")]
    if not fits:
        raise TaskError(f"{folder / records.RECORDS} holds no fit; let `laconic inspect` end first")
    return Inspection(**pick(Inspection, next(records.read(folder, _HEAD)), _HEAD)), fits
