"""The charts of all pages: lines that are named at their ends, and bars under their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from laconic_lab.report.drawing import COLOURS, colour, dash, marker, new_figure, printable, styled, to_svg
from laconic_lab.report.markup import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Form = Callable[[float], str]
WIDTH = 560
_LEFT, _RIGHT = 58, WIDTH - 12  # of the plot
_HEIGHT = 240
_BELOW, _ABOVE = 44, 26  # for ticks and an axis's name
_LETTER = 9.2  # average width of a letter of a name on a phone, 15 units high
_LINE = 19  # height of a line of text
_STRIP = 9  # height of one along an axis, above its ticks' words
_LONGEST = 24  # letters of a name in a drawing; the table has them all
_MOST_MARKS = 16  # on a line
_BAR, _PITCH, _LONGEST_OF_BARS = 16, 46, 44


@dataclass(frozen=True)
class Curve:
    """A scheme's points (x, y, hover), with x ascending; `thin` are the rounds behind them."""

    name: str
    number: int
    points: Sequence[tuple[float, float, str]]
    thin: Sequence[Sequence[tuple[float, float, str]]] = ()


@dataclass(frozen=True)
class Scale:
    """One axis: its name, what its ticks say, and what it must reach beside the points."""

    name: str
    form: Form
    is_log: bool = False
    reaches: Sequence[float] = ()
    ticks: Sequence[float] = ()  # where they are not found by the range


@dataclass(frozen=True)
class Chart:
    """A line chart: curves, levels of y, of which one may shade what is below, and one of x."""

    label: str
    x: Scale
    y: Scale
    levels: Sequence[tuple[float, str]] = ()
    shaded_below: tuple[float, str] | None = None
    upright: tuple[float, str] | None = None
    strip: Sequence[tuple[float, int | None, str]] = ()  # along x: (its end, colour, hover) of each part, ascending
    names_above: bool = False  # of lines that end at different places; else at their right
    curves: Sequence[Curve] = field(default=())


@styled
def line_chart(chart: Chart) -> str:
    """The drawing: grid, levels, rounds, lines with marks, names."""
    curves = chart.curves
    rows = _flag_rows(chart) if chart.names_above else []
    above = _ABOVE + _LINE * (1 + max(rows, default=-1))
    right = _RIGHT if chart.names_above else WIDTH - max(map(_name_width, curves)) - 22
    height = above + _HEIGHT + _BELOW
    figure, axes = new_figure(WIDTH, height, _LEFT, right, _BELOW, _BELOW + _HEIGHT)
    every = [place for curve in curves for run in (curve.points, *curve.thin) for place in run]
    set_scales(axes, chart.x, chart.y, [place[0] for place in every], [place[1] for place in every])
    name_axes(figure, chart.x.name, chart.y.name, right)
    _draw_levels(axes, chart)
    begin, last = axes.get_xlim()
    for end, number, hover in chart.strip:
        fill = COLOURS["grid"] if number is None else colour(number)
        part = axes.axvspan(
            begin, min(end, last), -_STRIP / _HEIGHT, 0, color=fill, linewidth=0, clip_on=False, zorder=3
        )
        part.set_url(hover)
        begin = end
    for curve in curves:
        look: dict[str, Any] = {"color": colour(curve.number), "clip_on": False}
        for run in filter(None, curve.thin):
            axes.plot(*_columns(run), linewidth=1, alpha=0.35, **look)
        axes.plot(*_columns(curve.points), linestyle=dash(curve.number), **look)
    for curve in curves:
        every_nth = math.ceil(len(curve.points) / _MOST_MARKS)
        draw_marks(axes, curve.number, list(reversed(curve.points[::-1][::every_nth])))  # the last among them
    (_name_above if chart.names_above else _name_at_right)(figure, axes, chart, rows)
    return to_svg(figure, chart.label)


def set_scales(axes: Axes, x: Scale, y: Scale, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Ranges and ticks around all values: round numbers at both ends, or a little wider on a logarithmic scale."""
    for axis, scale, values in ((axes.xaxis, x, xs), (axes.yaxis, y, ys)):
        low, high, ticks = _logarithmic(scale, values) if scale.is_log else _linear(scale, values)
        is_x = axis is axes.xaxis
        if scale.is_log:
            (axes.set_xscale if is_x else axes.set_yscale)("log")
        (axes.set_xlim if is_x else axes.set_ylim)(low, high)
        axis.set_ticks(ticks, [printable(scale.form(tick)) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.grid(axis="y")


def _linear(scale: Scale, values: Sequence[float]) -> tuple[float, float, list[float]]:
    from matplotlib.ticker import MaxNLocator

    ends = [*values, *scale.reaches]
    low, high = min(ends), max(ends)
    high = high if high > low else low + (abs(low) or 1.0)
    places = MaxNLocator(nbins=6, steps=[1, 2, 5, 10]).tick_values(low, high)
    ticks = [round(float(tick), 12) for tick in places]
    return ticks[0], ticks[-1], ticks


def _logarithmic(scale: Scale, values: Sequence[float]) -> tuple[float, float, list[float]]:
    from matplotlib.ticker import LogLocator

    ends = [*values, *scale.reaches]
    margin = (max(ends) / min(ends)) ** 0.03 if max(ends) > min(ends) else 2
    low, high = min(ends) / margin, max(ends) * margin
    ticks = [tick for tick in scale.ticks if low <= tick <= high]
    for subs in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        if len(ticks) >= 4 or scale.ticks:
            break
        places = LogLocator(subs=subs, numticks=99).tick_values(low, high)
        ticks = [float(f"{tick:.6g}") for tick in places if low <= tick <= high]
    return low, high, ticks


def name_axes(figure: Figure, x: str, y: str, right: float) -> None:
    """The names of both axes: y's at the top left, x's below its end."""
    _text(figure, 0, figure.bbox.height - 13, y, "left", gid="axis-name")
    _text(figure, right, 5, x, "right", gid="axis-name")


def draw_marks(axes: Axes, number: int, points: Sequence[tuple[float, float, str]]) -> None:
    """A scheme's marker at each point, which says more where the mouse rests on it."""
    axes.scatter(
        *_columns(points),
        s=64,
        marker=marker(number),
        color=colour(number),
        edgecolors=COLOURS["paper"],
        linewidths=1,
        clip_on=False,
        zorder=3,
        urls=[*(printable(hover) for *_, hover in points), None],  # more than one keeps matplotlib from joining them
    )


def _columns(points: Sequence[tuple[float, float, str]]) -> tuple[list[float], list[float]]:
    return [place[0] for place in points], [place[1] for place in points]


def _draw_levels(axes: Axes, chart: Chart) -> None:
    level: dict[str, Any] = {"color": COLOURS["text"], "linewidth": 1, "linestyle": (0, (5, 4))}
    left = axes.get_xlim()[0]
    if chart.shaded_below is not None:
        y, name = chart.shaded_below
        axes.axhspan(axes.get_ylim()[0], y, color=COLOURS["tint"], linewidth=0, zorder=0)
        axes.axhline(y, **level)
        axes.annotate(name, (left, y), (6, -18), textcoords="offset points")
    for y, name in chart.levels:
        axes.axhline(y, **level)
        axes.annotate(name, (left, y), (6, 6), textcoords="offset points")
    if chart.upright is not None:
        x, name = chart.upright
        axes.axvline(x, **level)
        to_the_left = axes.transAxes.inverted().transform(axes.transData.transform((x, axes.get_ylim()[0])))[0] > 0.5
        side: dict[str, Any] = {"ha": "right" if to_the_left else "left", "gid": "halo", "zorder": 4}
        place = (-6 if to_the_left else 6, -14)
        axes.annotate(name, (x, 1), place, xycoords=("data", "axes fraction"), textcoords="offset points", **side)


def _ends(chart: Chart) -> list[float]:
    """The places along x at which the curves end, in pixels, before there is a figure."""
    _, axes = new_figure(WIDTH, _HEIGHT, _LEFT, _RIGHT, 0, _HEIGHT)
    every = [place for curve in chart.curves for run in (curve.points, *curve.thin) for place in run]
    set_scales(axes, chart.x, chart.y, [place[0] for place in every], [place[1] for place in every])
    return [float(axes.transData.transform(curve.points[-1][:2])[0]) for curve in chart.curves]


def _flag_rows(chart: Chart) -> list[int]:
    """The row of each curve's name above the plot, from below: of two names that meet the right one hangs higher."""
    ends = _ends(chart)
    rows = [0] * len(ends)
    placed: list[tuple[int, float]] = []
    for i in sorted(range(len(ends)), key=ends.__getitem__):
        width = _name_width(chart.curves[i])
        end = max(ends[i] - 5, width)
        rows[i] = 1 + max((row for row, before in placed if before + 12 > end - width), default=-1)
        placed.append((rows[i], end))
    return rows


def _name_above(figure: Figure, axes: Axes, chart: Chart, rows: Sequence[int]) -> None:
    """Names above the plot, each with a thread down to its line's end.

    Curves come from below and the left, so the place above their ends is free. A name reaches to the left of its
    thread, so that no thread crosses a name.
    """
    for curve, row in zip(chart.curves, rows, strict=True):
        x, y = axes.transData.transform(curve.points[-1][:2])
        base = _BELOW + _HEIGHT + 8 + _LINE * row
        _thread(figure, (x, y), (x, base + 10))
        _text(figure, max(x - 5, _name_width(curve)), base, curve, "right", gid="name")


def _name_at_right(figure: Figure, axes: Axes, chart: Chart, _: Sequence[int]) -> None:
    """Names to the right of lines that end together, moved apart where they would touch."""
    ends = sorted(
        ((*axes.transData.transform(curve.points[-1][:2]), curve) for curve in chart.curves), key=lambda end: -end[1]
    )
    heights = [float(y) for _, y, _ in ends]
    for i in range(1, len(heights)):
        heights[i] = min(heights[i], heights[i - 1] - _LINE)
    lowest = float(_BELOW - _LINE)  # none below the axis
    for i in reversed(range(len(heights))):
        heights[i] = max(heights[i], lowest + _LINE)
        lowest = heights[i]
    right = axes.bbox.x1
    for (x, y, curve), height in zip(ends, heights, strict=True):
        _thread(figure, (x + 6, y), (right + 18, height))
        _text(figure, right + 22, height - 4.5, curve, "left", gid="name")


def _thread(figure: Figure, start: tuple[float, float], end: tuple[float, float]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.transforms import IdentityTransform

    places = zip(start, end, strict=True)
    figure.add_artist(Line2D(*places, color=COLOURS["quiet"], linewidth=0.75, transform=IdentityTransform()))


def _text(figure: Figure, x: float, y: float, of: str | Curve, side: str, *, gid: str) -> None:
    from matplotlib.transforms import IdentityTransform

    text = of if isinstance(of, str) else short(of.name, _LONGEST)
    made = figure.text(x, y, printable(text), ha=side, va="baseline", transform=IdentityTransform(), gid=gid)
    if isinstance(of, Curve):
        made.set(color=colour(of.number), url=printable(of.name), zorder=5)


def _name_width(curve: Curve) -> float:
    return _LETTER * min(len(curve.name), _LONGEST)


@dataclass(frozen=True)
class Bar:
    """A scheme's parts, laid end to end: (value, colour, hover)."""

    name: str
    number: int
    parts: Sequence[tuple[float, str, str]]
    total: str


@styled
def bar_chart(label: str, form: Form, most: float, bars: Sequence[Bar]) -> str:
    """The drawing: an axis from 0, bars, and the total behind each."""
    plot_height = _PITCH * len(bars) + 6
    figure, axes = new_figure(WIDTH, plot_height + 24, 1, WIDTH - 72, 24, plot_height + 24)
    low, high, ticks = _linear(Scale("", form), [0.0, most])
    axes.set(xlim=(low, high), ylim=(0, plot_height), yticks=[])
    axes.set_xticks(ticks, [form(tick) for tick in ticks])
    axes.xaxis.get_ticklabels()[0].set_horizontalalignment("left")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x")
    axes.spines["bottom"].set_visible(False)
    per_pixel = high / axes.bbox.width
    for i, bar in enumerate(bars):
        top = plot_height - _PITCH * i - 4
        draw_marks(axes, bar.number, [(5 * per_pixel, top - 10, bar.name)])
        name = printable(short(bar.name, _LONGEST_OF_BARS))
        axes.annotate(name, (0, top - 15), (16, 0), textcoords="offset points", gid="halo")
        left = 0.0
        for value, fill, hover in bar.parts:
            (drawn,) = axes.barh(top - 29, value, _BAR, left, color=fill, edgecolor=COLOURS["paper"], linewidth=1)
            drawn.set_url(printable(hover))
            left += value
        axes.annotate(bar.total, (left, top - 34), (7, 0), textcoords="offset points", gid="halo")
    return to_svg(figure, label)
