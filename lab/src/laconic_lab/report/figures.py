"""The figures of a comparison's rows, each with its numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence

from laconic_lab.measures import Measure
from laconic_lab.report.axis import linear, logarithmic
from laconic_lab.report.bars import PLACES, Bar, bar_chart
from laconic_lab.report.facts import Facts, Point, ShownRow
from laconic_lab.report.lines import LEFT, RIGHT, Curve, Level, flags, flags_height, line_chart, plot_places
from laconic_lab.report.marks import colour
from laconic_lab.report.markup import brief_percent, figure, number, numbers_behind, percent, si_bytes, text

_LOG_FROM = 5  # above this ratio of the slowest run to the fastest, the fast ones would share a fifth of the width


def over_time(facts: Facts) -> str:
    """What schemes are judged by against training seconds."""
    ends = [row.middle[-1].seconds for row in facts.rows]
    is_log = max(ends) > _LOG_FROM * min(ends)
    thin = f" Thin lines are the {facts.setting.rounds} rounds, bold ones their median." * (facts.setting.rounds > 1)
    equal = " On the logarithmic axis, twice as fast is the same distance everywhere." * is_log
    return figure(
        f"{facts.measure.noun.capitalize()} against training time",
        f"Further left is sooner.{thin}{equal}",
        _curves(facts, "seconds", "training seconds", is_log),
        _evaluations(facts, "seconds", ".2f"),
    )


def over_bytes(facts: Facts) -> str:
    """What schemes are judged by against the bytes a worker sent."""
    silent = [row.scheme for row in facts.rows if not any(point.bytes_out for point in row.middle)]
    left_out = f" Left out, since it sent nothing: {', '.join(silent)}." * bool(silent)
    return figure(
        f"{facts.measure.noun.capitalize()} against bytes sent",
        f"Sent by one worker so far, on a logarithmic axis.{left_out}",
        _curves(facts, "bytes_out", "bytes sent per worker", True) if len(silent) < len(facts.rows) else "",
        _evaluations(facts, "bytes_out", ",.0f"),
    )


def _curves(facts: Facts, quantity: str, x_name: str, is_log: bool) -> str:
    """What schemes are judged by, over a quantity of the evaluations; a logarithmic axis leaves out its zeros."""
    measure = facts.measure

    def places(points: Sequence[Point], scheme: str) -> list[tuple[float, float, str]]:
        found = [
            (getattr(point, quantity), worth, f"{scheme}, {_hover(point, measure)}")
            for point in points
            if (worth := getattr(point, measure.name)) is not None
        ]
        return [place for place in found if place[0] > 0 or not is_log]

    curves = [
        Curve(
            row.scheme,
            facts.schemes.index(row.scheme),
            places(row.middle, row.scheme),
            [places(points, row.scheme) for points in row.rounds] if len(row.rounds) > 1 else (),
        )
        for row in facts.rows
    ]
    curves = [curve for curve in curves if curve.points]
    every = [place for curve in curves for run in (curve.points, *curve.thin) for place in run]
    form = si_bytes if quantity == "bytes_out" else "{:g}".format
    x = (logarithmic if is_log else linear)(x_name, [place[0] for place in every], LEFT, RIGHT, form)
    target = facts.setting.target
    levels = [] if target is None else [Level(target, f"target {measure.brief(target)}")]
    heights = [place[1] for place in every] + [level.y for level in levels]
    y = linear(measure.noun, heights, *plot_places(flags_height(curves, x)), measure.brief)
    return line_chart(f"{measure.noun.capitalize()} over {x_name}", x, y, curves, levels, flags(curves, x, y))


def _hover(point: Point, measure: Measure) -> str:
    worth = measure.text(getattr(point, measure.name))
    return f"step {point.step}: {worth} after {point.seconds:.2f} s, {point.bytes_out:,.0f} bytes"


def _evaluations(facts: Facts, quantity: str, form: str) -> str:
    measure = facts.measure
    rows = [
        [
            row.scheme,
            str(i),
            str(point.step),
            number(getattr(point, quantity), form),
            measure.text(getattr(point, measure.name)),
        ]
        for row in facts.rows
        for i, points in enumerate(row.rounds, 1)
        for point in points
    ]
    name = "bytes sent" if quantity == "bytes_out" else quantity
    title = f"{measure.noun.capitalize()} and {name}"
    return numbers_behind(title, ["scheme", "round", "step", name, measure.noun], rows)


def step_split(facts: Facts) -> str:
    """Where a step's time goes, in milliseconds and in shares."""
    phases = list(dict.fromkeys(phase for row in facts.rows for phase in row.split_ms))
    longest = max(sum(row.split_ms.values()) for row in facts.rows)
    ms = linear("", [0.0, longest], *PLACES, lambda tick: f"{tick:g} ms")
    shares = linear("", [0.0, 1.0], *PLACES, brief_percent)
    rows = [
        [row.scheme, *(number(row.split_ms.get(phase), ".2f") for phase in phases), f"{sum(row.split_ms.values()):.2f}"]
        for row in facts.rows
    ]
    charts = [
        bar_chart("Milliseconds of a step", ms, [_split_bar(facts, row, phases, False) for row in facts.rows]),
        bar_chart("Shares of a step", shares, [_split_bar(facts, row, phases, True) for row in facts.rows]),
    ]
    return figure(
        "Where a step's time goes",
        "In milliseconds, and as shares of the step. Select to decode overlap the backward pass; "
        "compute is what lay outside them.",
        _keys(phases) + f'<div class="pair">{"".join(charts)}</div>',
        numbers_behind("Where a step's time goes", ["scheme", *(f"{phase} ms" for phase in phases), "sum ms"], rows),
        is_wide=True,
    )


def _keys(phases: Sequence[str]) -> str:
    box = '<svg viewBox="0 0 14 14" aria-hidden="true"><rect class="p{}" width="14" height="14"/></svg>'
    return (
        f'<ul class="keys">{"".join(f"<li>{box.format(i)}{text(phase)}</li>" for i, phase in enumerate(phases))}</ul>'
    )


def _split_bar(facts: Facts, row: ShownRow, phases: Sequence[str], is_share: bool) -> Bar:
    whole = sum(row.split_ms.values())
    parts = [
        (ms / whole if is_share and whole else ms, f"p{phases.index(phase)}", f"{phase} {ms:.2f} ms")
        for phase, ms in row.split_ms.items()
    ]
    return Bar(row.scheme, facts.schemes.index(row.scheme), parts, "" if is_share else f"{whole:.1f} ms")


def link_use(facts: Facts) -> str:
    """How much of the link's rate was used while exchanging."""
    used = [(row.scheme, use) for row in facts.rows if (use := row.figures["link_use"]) is not None]
    bars = []
    for scheme, use in used:
        place = facts.schemes.index(scheme)
        bars.append(Bar(scheme, place, [(use, f"bar {colour(place)}", percent(use))], f"{100 * use:.1f} %"))
    axis = linear("", [0.0, 1.0, *(use for _, use in used)], *PLACES, brief_percent)
    return figure(
        "Link use",
        "Share of the link's rate that was used while exchanging. A full link is the bottleneck; "
        "one that is not waits for the workers.",
        bar_chart("Link use", axis, bars),
        numbers_behind("Link use", ["scheme", "link use"], [[scheme, percent(use)] for scheme, use in used]),
    )
