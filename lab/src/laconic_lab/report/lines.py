"""Line charts in SVG, each line named at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from laconic_lab.report import marks
from laconic_lab.report.axis import Axis
from laconic_lab.report.markup import short, text

WIDTH = 560  # units of the drawing: pixels on a desk, 0.65 of one on a phone, where letters are 16 units instead of 13
LEFT, RIGHT = 58, WIDTH - 12  # of the plot
_HEIGHT = 240
_LETTER = 9.2  # average width of a letter of a name there, 15 units high
_LINE = 19  # height of a line of text
_LONGEST = 24  # letters of a name in a drawing; the table has them all


@dataclass(frozen=True)
class Curve:
    """A scheme's points (x, y, hover), with x ascending; `thin` are the rounds behind them."""

    name: str
    number: int
    points: Sequence[tuple[float, float, str]]
    thin: Sequence[Sequence[tuple[float, float, str]]] = ()


@dataclass(frozen=True)
class Level:
    """A dashed line across the chart, at a value of y."""

    y: float
    name: str
    shades_below: bool = False


@dataclass(frozen=True)
class Upright:
    """A dashed line from top to bottom, at a value of x."""

    x: float
    name: str


def plot_places(above: float) -> tuple[float, float]:
    """The bottom and the top of a plot under the axis's name and what else stands above it."""
    return 26 + above + _HEIGHT, 26 + above


def flags_height(curves: Sequence[Curve], x: Axis) -> float:
    """Room that the names above the lines' ends need."""
    return _LINE * (1 + max(row for row, _ in _flag_places(curves, x)))


def flags(curves: Sequence[Curve], x: Axis, y: Axis) -> str:
    """Names above the plot, each with a thread down to its line's end.

    Curves come from below and the left, so the place above their ends is free. A name reaches to the left of its
    thread, and of two names that meet the right one hangs higher, so no thread crosses a name.
    """
    threads = []
    names = []
    for curve, (row, end) in zip(curves, _flag_places(curves, x), strict=True):
        at_x = x.at(curve.points[-1][0])
        at_y = y.at(curve.points[-1][1])
        base = y.end - 8 - _LINE * row
        threads.append(f'<path class="thread" d="M{at_x:.1f} {at_y:.1f}V{base - 10:.1f}"/>')
        names.append(_name(curve, end, base, "end"))
    return "".join(threads + names)


def _flag_places(curves: Sequence[Curve], x: Axis) -> list[tuple[int, float]]:
    """For each curve the row of its name, from below, and where the name ends."""
    places: dict[int, tuple[int, float]] = {}
    for i in sorted(range(len(curves)), key=lambda i: x.at(curves[i].points[-1][0])):
        width = _name_width(curves[i])
        end = max(x.at(curves[i].points[-1][0]) - 5, width)
        row = 1 + max((other for other, before in places.values() if before + 12 > end - width), default=-1)
        places[i] = row, end
    return [places[i] for i in range(len(curves))]


def side_names(curves: Sequence[Curve], x: Axis, y: Axis) -> str:
    """Names to the right of lines that end together, moved apart where they would touch."""
    order = sorted(curves, key=lambda curve: y.at(curve.points[-1][1]))
    ends = [y.at(curve.points[-1][1]) for curve in order]
    at = list(ends)
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + _LINE)
    at.append(y.start + _LINE)  # none below the axis
    for i in reversed(range(len(ends))):
        at[i] = min(at[i], at[i + 1] - _LINE)
    parts = []
    for curve, end, here in zip(order, ends, at, strict=False):
        start = x.at(curve.points[-1][0]) + 6
        parts.append(f'<path class="thread" d="M{start:.1f} {end:.1f}L{x.end + 18:.1f} {here:.1f}"/>')
        parts.append(_name(curve, x.end + 22, here + 4.5, "start"))
    return "".join(parts)


def side_width(curves: Sequence[Curve]) -> float:
    """Room that the names on the right need."""
    return max(map(_name_width, curves)) + 22


def line_chart(
    label: str,
    x: Axis,
    y: Axis,
    curves: Sequence[Curve],
    levels: Sequence[Level],
    names: str,
    uprights: Sequence[Upright] = (),
) -> str:
    """The drawing: grid, levels, rounds, lines with marks, names."""
    parts = [_level(level, x, y) for level in levels if level.shades_below]
    parts += [grid(x, y)] + [_level(level, x, y) for level in levels if not level.shades_below]
    parts += [
        f'<path class="thin {marks.colour(c.number)}" d="{_path(run, x, y)}"/>' for c in curves for run in c.thin if run
    ]
    for curve in curves:
        look = f'class="line {marks.colour(curve.number)}"{marks.dash(curve.number)}'
        parts.append(f'<path {look} d="{_path(curve.points, x, y)}"/>')
    parts += [_marks(curve, x, y) for curve in curves] + [_upright(upright, x, y) for upright in uprights]
    return svg(label, y.start + 44, "".join(parts) + names)


def _level(level: Level, x: Axis, y: Axis) -> str:
    at = y.at(level.y)
    below = f'<path class="shade" d="M{x.start} {at:.1f}H{x.end:.1f}V{y.start}H{x.start}z"/>'
    return (
        f'{below * level.shades_below}<path class="level" d="M{x.start} {at:.1f}H{x.end:.1f}"/>'
        f'<text x="{x.start + 6}" y="{at + (18 if level.shades_below else -6):.1f}">{text(level.name)}</text>'
    )


def _upright(upright: Upright, x: Axis, y: Axis) -> str:
    """Its name stands where there is more room, and above all lines."""
    at = x.at(upright.x)
    to_the_left = at > (x.start + x.end) / 2
    place = f'x="{at - 6 if to_the_left else at + 6:.1f}" y="{y.end + 14}"'
    anchor = "end" if to_the_left else "start"
    return (
        f'<path class="level" d="M{at:.1f} {y.end}V{y.start}"/>'
        f'<text class="halo" {place} text-anchor="{anchor}">{text(upright.name)}</text>'
    )


def svg(label: str, height: float, inside: str, *, width: float = WIDTH) -> str:
    """A drawing that scales to its box."""
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{text(label)}">{inside}</svg>'


def grid(x: Axis, y: Axis) -> str:
    """Both axes with their names and ticks, and a line across at each tick of y."""
    parts = [f'<text class="axis-name" x="0" y="13">{text(y.name)}</text>']
    for value, label in y.ticks:
        at = y.at(value)
        parts.append(f'<path class="grid" d="M{x.start} {at:.1f}H{x.end}"/>')
        parts.append(f'<text x="{x.start - 7}" y="{at + 4.5:.1f}" text-anchor="end">{text(label)}</text>')
    for value, label in x.ticks:
        at = x.at(value)
        parts.append(f'<path class="tick" d="M{at:.1f} {y.start}v5"/>')
        parts.append(f'<text x="{at:.1f}" y="{y.start + 20}" text-anchor="middle">{text(label)}</text>')
    parts.append(f'<path class="axis" d="M{x.start} {y.start}H{x.end}"/>')
    parts.append(f'<text class="axis-name" x="{x.end}" y="{y.start + 39}" text-anchor="end">{text(x.name)}</text>')
    return "".join(parts)


def _path(points: Sequence[tuple[float, float, str]], x: Axis, y: Axis) -> str:
    return "M" + "L".join(f"{x.at(px):.1f} {y.at(py):.1f}" for px, py, _ in points)


def _marks(curve: Curve, x: Axis, y: Axis) -> str:
    """At most about 16 marks on a line, the last point among them."""
    every = math.ceil(len(curve.points) / 16)
    chosen = list(reversed(curve.points[::-1][::every]))
    return "".join(marks.marker(curve.number, x.at(px), y.at(py), text(hover)) for px, py, hover in chosen)


def _name_width(curve: Curve) -> float:
    return _LETTER * min(len(curve.name), _LONGEST)


def _name(curve: Curve, x: float, y: float, anchor: str) -> str:
    place = f'class="name halo {marks.colour(curve.number)}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}>{short(curve.name, _LONGEST)}<title>{text(curve.name)}</title></text>"
