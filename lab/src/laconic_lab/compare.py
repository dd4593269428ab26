"""The same job under several schemes, held side by side; it reads nothing but records."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from laconic_lab import records
from laconic_lab.figures import MEASURES, Measure, Record, Values, median, of_rounds

_REFERENCES = ("dense", "bf16")  # whose final value sets the target; the best of all where there is neither


@dataclass(frozen=True)
class Row(Record):
    """One scheme's figures beside the others'; medians over rounds, bytes per worker and step."""

    noun: ClassVar[str] = "row"

    scheme: str
    folder: str
    accuracy: float
    seconds_to_target: float | None  # training time until an evaluation reached the target; None if a round's did not
    step_ms: float
    step_ms_quartiles: tuple[float, float]
    split_ms: dict[str, float]
    bytes_out: int
    bytes_in: int
    ratio: float | None
    speedup: float | None  # of time to target, against dense
    speedup_bf16: float | None
    figures: Values
    loss: float | None = None
    diverged_at: int | None = None  # the step from which on some round's loss was no number


@dataclass(frozen=True)
class Comparison:
    """All rows, and what they were timed to."""

    measure: str
    target: float | None  # None where all diverged
    steps: int
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.as_dict() for row in self.rows]}


def folder_of(scheme: str) -> str:
    """The name of a scheme's folder within a comparison's."""
    return re.sub(r"[^\w.=-]+", "_", scheme)


def round_of(out: Path, scheme: str, number: int) -> Path:
    """The folder of one run's records."""
    return out / folder_of(scheme) / f"round-{number}"


def compare(
    out: Path,
    schemes: Sequence[str],
    rounds: int,
    measure: Measure,
    target: float | None = None,
    link_bits_per_s: int | None = None,
) -> Comparison:
    """Read the records of every scheme and round and hold them side by side; schemes are named as they print."""
    runs = {scheme: [Run.read(round_of(out, scheme, number)) for number in range(1, rounds + 1)] for scheme in schemes}
    if target is None:
        target = _default_target(runs, measure)
    return _side_by_side(runs, measure, target, link_bits_per_s)


def compare_so_far(
    out: Path, schemes: Sequence[str], setting: Mapping[str, Any], link_bits_per_s: int | None
) -> Comparison:
    """The same of the rounds that have ended, while others go on."""
    ended = {scheme: rounds_so_far(out, folder_of(scheme), setting["rounds"]) for scheme in schemes}
    runs = {s: [Run.read(round_of(out, s, number)) for number in range(1, n + 1)] for s, n in ended.items() if n}
    return _side_by_side(runs, MEASURES[setting["measure"]], setting["target"], link_bits_per_s)


def rounds_so_far(out: Path, folder: str, rounds: int) -> int:
    """The number of a scheme's rounds that have ended."""
    paths = [out / folder / f"round-{number}" for number in range(1, rounds + 1)]
    return sum((path / records.RECORDS).exists() and any(records.read(path, "result")) for path in paths)


def _side_by_side(
    runs: Mapping[str, Sequence[Run]], measure: Measure, target: float | None, link_bits_per_s: int | None
) -> Comparison:
    times = {scheme: median([run.seconds_to(target, measure) for run in of]) for scheme, of in runs.items()}
    rows = [_row(scheme, of, times, link_bits_per_s) for scheme, of in runs.items()]
    # One that diverged has fewer steps.
    steps = max((run.result["steps"] for of in runs.values() for run in of), default=0)
    return Comparison(measure.name, target, steps, tuple(rows))


def _default_target(runs: Mapping[str, Sequence[Run]], measure: Measure) -> float | None:
    """The target that the reference sets; None where all runs diverged."""
    finals = {scheme: median([run.result[measure.name] for run in of]) for scheme, of in runs.items()}
    sound = {scheme: final for scheme, final in finals.items() if final is not None and not _diverged_at(runs[scheme])}
    if not sound:
        return None
    return measure.target(next((sound[name] for name in _REFERENCES if name in sound), measure.best([*sound.values()])))


@dataclass(frozen=True)
class Run:
    """One run's records."""

    result: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The records of one folder."""
        facts = list(records.read(folder))
        results, steps, evaluations = ([f for f in facts if f["kind"] == kind] for kind in ("result", "step", "eval"))
        return cls(results[-1], steps[records.WARM_UP_STEPS :] or steps, evaluations)

    def seconds_to(self, target: float | None, measure: Measure) -> float | None:
        """Training time until an evaluation reached the target; the one before any training does not count."""
        if self.result["diverged_at"] is not None or target is None:
            return None
        trained = (fact for fact in self.evaluations if fact["step"] > 0)
        return next((float(fact["seconds"]) for fact in trained if measure.reaches(fact[measure.name], target)), None)


def conclusion(comparison: Comparison, *, is_timed: bool) -> str:
    """One sentence on the fastest scheme, or without times the one that sent least, beside bf16."""
    bf16 = next((row for row in comparison.rows if row.scheme == "bf16"), None)
    others = [row for row in comparison.rows if row.scheme not in _REFERENCES and row.bytes_out and not row.diverged_at]
    if bf16 is None or not others or comparison.target is None:
        return ""
    measure = MEASURES[comparison.measure]
    row = min(others, key=lambda row: (row.seconds_to_target or math.inf, row.bytes_out))
    fewer = f"{bf16.bytes_out / row.bytes_out:.0f}x fewer bytes"
    if not is_timed:
        came = [f"{measure.text(getattr(each, measure.name))}" for each in (row, bf16)]
        return f"{row.scheme} sent {fewer} than bf16, and came to {came[0]} where bf16 came to {came[1]}"
    goal = measure.brief(comparison.target)
    if row.speedup_bf16 is None:
        return f"{row.scheme} sent {fewer} than bf16, and one of them did not reach {goal}"
    return f"{row.scheme} reached {goal} {row.speedup_bf16:.1f}x sooner than bf16, sending {fewer}"


def _row(scheme: str, runs: Sequence[Run], times: Mapping[str, float | None], link_bits_per_s: int | None) -> Row:
    step_ms = [fact["ms"] for run in runs for fact in run.steps]
    split = {
        name: statistics.median(run.result["split_ms"][name] for run in runs) for name in runs[0].result["split_ms"]
    }
    result = runs[0].result
    steps = result["steps"]
    return Row(
        scheme=scheme,
        folder=folder_of(scheme),
        accuracy=statistics.median(run.result["accuracy"] for run in runs),
        seconds_to_target=times[scheme],
        step_ms=statistics.median(step_ms),
        step_ms_quartiles=quartiles(step_ms),
        split_ms=split,
        bytes_out=round(result["bytes_out"] / steps),
        bytes_in=round(result["bytes_in"] / steps),
        ratio=result["ratio"],
        speedup=_quotient(times.get("dense"), times[scheme]),
        speedup_bf16=_quotient(times.get("bf16"), times[scheme]),
        figures={**of_rounds([run.result for run in runs], steps), "link_use": _link_use(runs, link_bits_per_s)},
        loss=median([run.result["loss"] for run in runs]),
        diverged_at=_diverged_at(runs),
    )


def _diverged_at(runs: Sequence[Run]) -> int | None:
    return min((run.result["diverged_at"] for run in runs if run.result["diverged_at"] is not None), default=None)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _link_use(runs: Sequence[Run], link_bits_per_s: int | None) -> float | None:
    if runs[0].result.get("consensus_distance") is not None:
        return None  # gossip talks while it trains, so for how long is not known
    steps = [fact for run in runs for fact in run.steps]
    sent_bits = 8 * sum(fact.get("link_bytes_out", 0) for fact in steps)
    exchange_s = sum(fact["exchange_ms"] for fact in steps) / 1e3
    return sent_bits / exchange_s / link_bits_per_s if sent_bits and exchange_s and link_bits_per_s else None


def _quotient(reference: float | None, here: float | None) -> float | None:
    return reference / here if reference is not None and here else None
