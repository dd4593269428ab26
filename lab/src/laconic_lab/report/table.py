"""The table: one row per scheme, the best of each column marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from laconic.cli import number
from laconic_lab.figures import Figure, Measure, Place, columns
from laconic_lab.report.facts import Facts, ShownRow
from laconic_lab.report.markup import heads, percent, quartiles, text
from laconic_lab.report.markup import table as markup_table

_ON_THE_LINK = ("link_bytes_out", "link_bytes_in", "link_use")


@dataclass(frozen=True)
class _Column:
    """A column; neighbours of one group share a head."""

    group: str
    head: str
    value: Callable[[ShownRow], float | None]
    form: Callable[[float | None], str]
    best: Callable[[list[float]], float] | None = None
    below: Callable[[ShownRow], str] | None = None  # a second, smaller line
    is_lab: bool = False  # means nothing outside a lab


def _columns(measure: Measure, target: float | None, rows: Sequence[ShownRow]) -> list[_Column]:
    def whole(value: float | None) -> str:
        return number(value, ",.0f")

    def tenth(value: float | None) -> str:
        return number(value, ",.1f")

    def times(value: float | None) -> str:
        return number(value, ".2f", "x")

    to_target = "s to target" if target is None else f"s to {measure.brief(target)}"
    return [
        _Column("", measure.noun, lambda row: getattr(row, measure.name), measure.text, measure.best),
        _Column("", to_target, lambda row: row.seconds_to_target, tenth, min),
        _Column("", "step ms", lambda row: row.step_ms, tenth, min, lambda row: quartiles(row.step_ms_quartiles)),
        _Column("bytes out per step", "counted", lambda row: row.bytes_out, whole, min),
        _Column("bytes out per step", "interface", _figure("link_bytes_out"), whole, min, _more_out, True),
        _Column("bytes in per step", "counted", lambda row: row.bytes_in, whole, min),
        _Column("bytes in per step", "interface", _figure("link_bytes_in"), whole, min, _more_in, True),
        _Column("", "ratio", lambda row: row.ratio, lambda value: number(value, ",.1f", "x"), max),
        _Column("speed-up vs", "dense", lambda row: row.speedup, times, max),
        _Column("speed-up vs", "bf16", lambda row: row.speedup_bf16, times, max),
        _Column("", "link use", _figure("link_use"), percent, None, None, True),
        *(_Column("", figure.head, _figure(figure.name), figure.shown) for figure in other_figures(rows)),
    ]


def other_figures(rows: Sequence[ShownRow]) -> list[Figure]:
    """The figures that some schemes have beside what a link carried, which has columns of its own."""
    shown = [figure for place in (Place.BYTES, Place.END) for figure in columns([row.figures for row in rows], place)]
    return [figure for figure in shown if figure.name not in _ON_THE_LINK]


def _figure(name: str) -> Callable[[ShownRow], float | None]:
    return lambda row: row.figures[name]


def _more_out(row: ShownRow) -> str:
    return _more(row.figures["link_bytes_out"], row.bytes_out)


def _more_in(row: ShownRow) -> str:
    return _more(row.figures["link_bytes_in"], row.bytes_in)


def _more(seen: float | None, counted: float) -> str:
    """The bytes that the interface saw beyond those that were counted."""
    return number(100 * (seen / counted - 1) if seen is not None and counted else None, "+.1f", " %")


def table(facts: Facts) -> str:
    """Every scheme's figures side by side."""
    columns = [
        c
        for c in _columns(facts.measure, facts.setting.target, facts.rows)
        if facts.setting.hosts is not None or not c.is_lab
    ]
    best = [_best(column, facts.rows) for column in columns]
    rows = []
    for row in facts.rows:
        diverged = "" if row.diverged_at is None else f"<small>diverged at step {text(row.diverged_at)}</small>"
        cells = [_cell(column, row, mark) for column, mark in zip(columns, best, strict=True)]
        rows.append([f"{text(row.scheme)}{diverged}", *cells])
    return markup_table("Every scheme", _head(columns), rows)


def _best(column: _Column, rows: Sequence[ShownRow]) -> float | None:
    """The best value; what sends nothing is a bound, not a contestant, and what diverged is neither."""
    values = [value for row in rows if _competes(row) and (value := column.value(row)) is not None]
    return column.best(values) if column.best and len(set(values)) > 1 else None


def _competes(row: ShownRow) -> bool:
    return row.bytes_out > 0 and row.diverged_at is None


def _cell(column: _Column, row: ShownRow, best: float | None) -> str:
    value = column.value(row)
    shown = text(column.form(value))
    if value is not None and value == best and _competes(row):
        shown = f"<strong>{shown}</strong>"
    below = f"<small>{text(column.below(row))}</small>" if column.below and value is not None else ""
    return f"{shown}{below}"


def _head(columns: Sequence[_Column]) -> list[str]:
    upper = heads(["scheme"], ' rowspan="2"')
    lower = ""
    for group, members in groupby(columns, lambda column: column.group):
        names = [column.head for column in members]
        if group:
            upper += f'<th scope="colgroup" colspan="{len(names)}">{text(group)}</th>'
            lower += heads(names)
        else:
            upper += heads(names, ' rowspan="2"')
    return [upper, lower]
