"""The records of a comparison, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from laconic_lab import figures, records
from laconic_lab.compare import Comparison, Row, rounds_so_far
from laconic_lab.errors import TaskError
from laconic_lab.figures import MEASURES, Measure, pick
from laconic_lab.report.drawing import looks


@dataclass(frozen=True)
class Setting:
    """The setting of a comparison; hosts and link are None outside a lab."""

    task: str
    model: str | None
    workers: int
    hosts: int | None
    link: str | None
    link_of: dict[str, str]
    steps: int | None
    batch: int | None  # per worker
    seed: int
    rounds: int
    target: float | None
    measure: str = "accuracy"  # what the target is of
    slow_of: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """One evaluation; seconds count training alone, bytes_out are one worker's so far."""

    step: int
    seconds: float
    accuracy: float
    bytes_out: float
    loss: float | None = None


@dataclass(frozen=True)
class ShownRow(Row):
    """A comparison's row, and the evaluations of each round."""

    rounds: tuple[tuple[Point, ...], ...] = ()

    @cached_property
    def middle(self) -> tuple[Point, ...]:
        """The median over rounds at each step that every round evaluated."""
        rounds = [{point.step: point for point in points} for points in self.rounds]
        shared = [step for step in rounds[0] if all(step in points for points in rounds)] if rounds else []
        return tuple(
            Point(
                step,
                seconds=median(r[step].seconds for r in rounds),
                accuracy=median(r[step].accuracy for r in rounds),
                bytes_out=median(r[step].bytes_out for r in rounds),
                loss=figures.median([r[step].loss for r in rounds]),
            )
            for step in shared
        )


@dataclass(frozen=True)
class Facts:
    """Everything a page shows."""

    setting: Setting
    rows: tuple[ShownRow, ...]

    @property
    def measure(self) -> Measure:
        """The measure that schemes are judged by."""
        return MEASURES[self.setting.measure]

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        """Each scheme once, in the order of the records."""
        return tuple(dict.fromkeys(row.scheme for row in self.rows))

    @cached_property
    def looks(self) -> dict[str, int]:
        """The number of each scheme's colour, dash and marker in every figure."""
        return looks(self.schemes)


def read_facts(folder: Path) -> Facts:
    """Read the comparison in a folder and the runs below it."""
    comparison = next(records.read(folder, "comparison"), None)
    if comparison is None:
        held = "one run of `laconic train`" if next(records.read(folder, "job"), None) else "no comparison"
        raise TaskError(f"{folder} holds {held}; give a folder that `laconic compare --out` wrote")
    setting = Setting(**pick(Setting, comparison, "setting"))
    rows = tuple(_row(folder, fact, setting.rounds) for fact in records.read(folder, "row"))
    if not rows:
        raise TaskError(f"{folder / records.RECORDS} holds no row; let `laconic compare` end first")
    return Facts(setting, rows)


def facts_so_far(folder: Path, comparison: Mapping[str, Any], comparison_so_far: Comparison) -> Facts:
    """Those of a comparison that goes on, whose rows are not on disk yet."""
    setting = Setting(**pick(Setting, comparison, "setting"))
    shown = [rounds_so_far(folder, row.folder, setting.rounds) for row in comparison_so_far.rows]
    rows = [_shown(folder, row.as_dict(), rounds) for row, rounds in zip(comparison_so_far.rows, shown, strict=True)]
    return Facts(setting, tuple(rows))


def _row(folder: Path, fact: dict[str, Any], rounds: int) -> ShownRow:
    row = _shown(folder, fact, rounds)
    if not row.middle:
        raise TaskError(
            f"{folder / fact['folder']} has no evaluation that every round made; run `laconic compare` again"
        )
    return row


def _shown(folder: Path, fact: dict[str, Any], rounds: int) -> ShownRow:
    runs = [folder / fact["folder"] / f"round-{number}" for number in range(1, rounds + 1)]
    points = tuple(tuple(Point(**pick(Point, point, "point")) for point in records.read(run, "eval")) for run in runs)
    return replace(ShownRow.of(fact), rounds=points)
