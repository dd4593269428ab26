"""The records of a comparison, read and checked."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from laconic.errors import TaskError
from laconic.measure import records

_T = TypeVar("_T")
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Setting:
    """What was run; hosts and link are None outside a lab."""

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


@dataclass(frozen=True)
class Point:
    """One evaluation; seconds count training alone, bytes_out are one worker's so far."""

    step: int
    seconds: float
    accuracy: float
    bytes_out: float


@dataclass(frozen=True)
class Row:
    """One scheme's figures; bytes are per worker and step."""

    scheme: str
    accuracy: float
    seconds_to_target: float | None
    step_ms: float
    step_ms_quartiles: list[float] | None
    split_ms: dict[str, float]
    bytes_out: float
    bytes_in: float
    link_bytes_out: float | None  # what the network interface counted for the same steps
    link_bytes_in: float | None
    link_use: float | None
    ratio: float | None
    speedup: float | None
    speedup_bf16: float | None
    rounds: tuple[tuple[Point, ...], ...]
    diverged_at: int | None = None  # the step from which on some round's loss was no number

    @cached_property
    def middle(self) -> tuple[Point, ...]:
        """The median over rounds at each step that every round evaluated."""
        rounds = [{point.step: point for point in points} for points in self.rounds]
        shared = [step for step in rounds[0] if all(step in points for points in rounds)] if rounds else []
        return tuple(
            Point(
                step, *(median(getattr(r[step], name) for r in rounds) for name in ("seconds", "accuracy", "bytes_out"))
            )
            for step in shared
        )


@dataclass(frozen=True)
class Sweep:
    """One scheme on one link; speed-up is of the step time, against dense on the same link."""

    link: str
    scheme: str
    step_ms: float
    step_ms_quartiles: list[float] | None
    speedup: float | None
    speedup_bf16: float | None

    @property
    def bits_per_s(self) -> float:
        """The link's rate; infinite where the link is as fast as the machine."""
        return math.inf if self.link == "none" else float(self.link[:-4]) * _UNITS[self.link[-4:]]


@dataclass(frozen=True)
class Facts:
    """Everything a page shows."""

    setting: Setting
    rows: tuple[Row, ...]
    sweep: tuple[Sweep, ...]

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        """Each scheme once, in the order of the records; its place is its colour in every figure."""
        return tuple(dict.fromkeys([row.scheme for row in self.rows] + [point.scheme for point in self.sweep]))


def read_facts(folder: Path) -> Facts:
    """Read the comparison in a folder and the runs below it."""
    comparison = next(records.read(folder, "comparison"), None)
    if comparison is None:
        held = "one run of `laconic train`" if next(records.read(folder, "job"), None) else "no comparison"
        raise TaskError(f"{folder} holds {held}; give a folder that `laconic compare --out` wrote")
    setting = _pick(Setting, comparison)
    rows = tuple(_row(folder, fact, setting.rounds) for fact in records.read(folder, "row"))
    sweep = tuple(_pick(Sweep, fact) for fact in records.read(folder, "sweep"))
    if not rows and not sweep:
        raise TaskError(f"{folder / records.RECORDS} holds no row and no sweep; let `laconic compare` end first")
    return Facts(setting, rows, sweep)


def _row(folder: Path, fact: dict[str, Any], rounds: int) -> Row:
    runs = [folder / fact["folder"] / f"round-{number}" for number in range(1, rounds + 1)]
    points = tuple(tuple(_pick(Point, point) for point in records.read(run, "eval")) for run in runs)
    row = _pick(Row, {**fact, "rounds": points})
    if not row.middle:
        raise TaskError(
            f"{folder / fact['folder']} has no evaluation that every round made; run `laconic compare` again"
        )
    return row


def _pick(kind: type[_T], fact: dict[str, Any]) -> _T:
    """The fields of a fact that the class names; others are ignored."""
    wanted = fields(kind)  # type: ignore[arg-type]  # every caller's kind is a dataclass
    lacking = [field.name for field in wanted if field.name not in fact and field.default is MISSING]
    if lacking:
        raise ValueError(f"a {kind.__name__.lower()} lacks {lacking[0]}")
    return kind(**{field.name: fact[field.name] for field in wanted if field.name in fact})
