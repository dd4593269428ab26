"""The figures of a comparison, each with its numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.cli import number
from laconic_lab.figures import Measure
from laconic_lab.report.charts import Bar, Chart, Curve, Scale, bar_chart, line_chart
from laconic_lab.report.drawing import COLOURS, colour
from laconic_lab.report.facts import Facts, Point, ShownRow
from laconic_lab.report.markup import brief_percent, figure, keys, numbers_behind, percent, si_bytes

_LOG_FROM = 5  # above this ratio of the slowest run to the fastest, the fast ones would share a fifth of the width


def over_time(facts: Facts) -> str:
    """The figure of accuracy or loss against training seconds."""
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
    """The figure of accuracy or loss against the bytes that a worker sent."""
    silent = [row.scheme for row in facts.rows if not any(point.bytes_out for point in row.middle)]
    left_out = f" Left out, since it sent nothing: {', '.join(silent)}." * bool(silent)
    return figure(
        f"{facts.measure.noun.capitalize()} against bytes sent",
        f"Sent by one worker so far, on a logarithmic axis.{left_out}",
        _curves(facts, "bytes_out", "bytes sent per worker", True) if len(silent) < len(facts.rows) else "",
        _evaluations(facts, "bytes_out", ",.0f"),
    )


def _curves(facts: Facts, quantity: str, x_name: str, is_log: bool) -> str:
    """The chart of accuracy or loss over a quantity of the evaluations, but for the one before any training.

    That one would stretch the axis, so that nothing of the race is seen.
    """
    measure = facts.measure

    def places(points: Sequence[Point], scheme: str) -> list[tuple[float, float, str]]:
        shown = [
            (getattr(point, quantity), value, f"{scheme}, {_hover(point, measure)}")
            for point in points
            if (value := getattr(point, measure.name)) is not None
        ]
        return [place for place in shown if place[0] > 0]

    curves = [
        Curve(
            row.scheme,
            facts.looks[row.scheme],
            places(row.middle, row.scheme),
            [places(points, row.scheme) for points in row.rounds] if len(row.rounds) > 1 else (),
        )
        for row in facts.rows
    ]
    target = facts.setting.target
    levels = [] if target is None else [(target, f"target {measure.brief(target)}")]
    return line_chart(
        Chart(
            label=f"{measure.noun.capitalize()} over {x_name}",
            x=Scale(x_name, si_bytes if quantity == "bytes_out" else "{:g}".format, is_log=is_log),
            y=Scale(measure.noun, measure.brief, reaches=[y for y, _ in levels]),
            levels=levels,
            names_above=True,
            curves=[curve for curve in curves if curve.points],
        )
    )


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
    """The figure of where a step's time goes, in milliseconds and in shares."""
    phases = list(dict.fromkeys(phase for row in facts.rows for phase in row.split_ms))
    longest = max(sum(row.split_ms.values()) for row in facts.rows)
    rows = [
        [row.scheme, *(number(row.split_ms.get(phase), ".2f") for phase in phases), f"{sum(row.split_ms.values()):.2f}"]
        for row in facts.rows
    ]

    def bars(*, is_share: bool) -> list[Bar]:
        return [_split_bar(facts, row, phases, is_share) for row in facts.rows]

    charts = [
        bar_chart("Milliseconds of a step", "{:g} ms".format, longest, bars(is_share=False)),
        bar_chart("Shares of a step", brief_percent, 1.0, bars(is_share=True)),
    ]
    return figure(
        "Where a step's time goes",
        "In milliseconds, and as shares of the step. Select to decode overlap the backward pass; "
        "compute is what lay outside them.",
        keys([("solid", f"p{i}", phase) for i, phase in enumerate(phases)])
        + f'<div class="pair">{"".join(charts)}</div>',
        numbers_behind("Where a step's time goes", ["scheme", *(f"{phase} ms" for phase in phases), "sum ms"], rows),
        is_wide=True,
    )


def _split_bar(facts: Facts, row: ShownRow, phases: Sequence[str], is_share: bool) -> Bar:
    whole = sum(row.split_ms.values())
    parts = [
        (ms / whole if is_share and whole else ms, COLOURS[f"p{phases.index(phase)}"], f"{phase} {ms:.2f} ms")
        for phase, ms in row.split_ms.items()
    ]
    return Bar(row.scheme, facts.looks[row.scheme], parts, "" if is_share else f"{whole:.1f} ms")


def link_use(facts: Facts) -> str:
    """The figure of how much of the link's rate was used while exchanging."""
    used = [(row.scheme, use) for row in facts.rows if (use := row.figures["link_use"]) is not None]
    bars = [
        Bar(scheme, facts.looks[scheme], [(use, colour(facts.looks[scheme]), percent(use))], f"{100 * use:.1f} %")
        for scheme, use in used
    ]
    return figure(
        "Link use",
        "Share of the link's rate that was used while exchanging. A full link is the bottleneck; "
        "one that is not waits for the workers.",
        bar_chart("Link use", brief_percent, max(1.0, *(use for _, use in used)), bars),
        numbers_behind("Link use", ["scheme", "link use"], [[scheme, percent(use)] for scheme, use in used]),
    )
