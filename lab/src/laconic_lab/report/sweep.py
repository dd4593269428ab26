"""The figure of a sweep: where each scheme pays, and where dense is better."""

from __future__ import annotations

import math
from dataclasses import replace

from laconic_lab.report.axis import logarithmic
from laconic_lab.report.facts import Facts
from laconic_lab.report.lines import LEFT, WIDTH, Curve, Level, line_chart, plot_places, side_names, side_width
from laconic_lab.report.markup import figure, number, numbers_behind, quartiles


def over_links(facts: Facts) -> str:
    """Speed-up of the step time against link speed."""
    rows = [
        [
            point.scheme,
            point.link,
            number(point.step_ms, ",.1f"),
            quartiles(point.step_ms_quartiles),
            number(point.speedup, ".2f", "x"),
            number(point.speedup_bf16, ".2f", "x"),
        ]
        for point in facts.sweep
    ]
    return figure(
        "Speed-up against link speed",
        "Dense's median step over the scheme's, on the same link; both axes are logarithmic. "
        "Where a line falls below 1, dense is better.",
        _chart(facts) if any(point.speedup for point in facts.sweep) else "",
        numbers_behind("Speed-up", ["scheme", "link", "step ms", "quartiles", "vs dense", "vs bf16"], rows),
    )


def _chart(facts: Facts) -> str:
    rates = {point.link: point.bits_per_s for point in facts.sweep}
    after_last = 10 * max((rate for rate in rates.values() if rate < math.inf), default=1.0)
    places = {link: min(rate, after_last) for link, rate in rates.items()}  # none stands a decade after the last rate
    curves = []
    for i, scheme in enumerate(facts.schemes):
        mine = [point for point in facts.sweep if point.scheme == scheme]
        found = [(places[p.link], p.speedup, f"{scheme} at {p.link}: {p.speedup:.2f}x") for p in mine if p.speedup]
        curves += [Curve(scheme, i, sorted(found))] if found else []
    x = logarithmic("link of every host", list(places.values()), LEFT, WIDTH - side_width(curves), str)
    x = replace(x, ticks=tuple((place, link.partition(",")[0]) for link, place in places.items()))
    speedups = [place[1] for curve in curves for place in curve.points]
    # From 0.5 at most, so that the losing side is seen also when nobody is on it.
    y = logarithmic("speed-up of the step against dense", [0.5, 1.0, *speedups], *plot_places(0), lambda t: f"{t:g}x")
    level = Level(1.0, "slower than dense", shades_below=True)
    return line_chart("Speed-up over link speed", x, y, curves, [level], side_names(curves, x, y))
