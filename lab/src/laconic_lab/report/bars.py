"""Horizontal bars in SVG, each under its scheme's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic_lab.report import marks
from laconic_lab.report.axis import Axis
from laconic_lab.report.lines import WIDTH, svg
from laconic_lab.report.markup import short, text

PLACES = (1, WIDTH - 72)  # of the axis; the rest is for the number behind the longest bar
_BAR = 16
_PITCH = 46
_LONGEST = 44  # letters of a name above its bar


@dataclass(frozen=True)
class Bar:
    """A scheme's parts, laid end to end: (value, class, hover)."""

    name: str
    number: int
    parts: Sequence[tuple[float, str, str]]
    total: str


def bar_chart(label: str, axis: Axis, bars: Sequence[Bar]) -> str:
    """The drawing: axis, bars, and the total behind each."""
    bottom = _PITCH * len(bars) + 6
    drawn = []
    for i, (value, tick) in enumerate(axis.ticks):
        at = axis.at(value)
        anchor = "middle" if i else "start"
        drawn.append(f'<path class="grid" d="M{at:.1f} 0V{bottom}"/>')
        drawn.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{text(tick)}</text>')
    for i, bar in enumerate(bars):
        drawn.append(_bar(bar, axis, _PITCH * i + 4))
    return svg(label, bottom + 24, "".join(drawn))


def _bar(bar: Bar, axis: Axis, top: float) -> str:
    drawn = [
        marks.marker(bar.number, axis.start + 5, top + 10),
        f'<text class="halo" x="{axis.start + 16}" y="{top + 15}">{short(bar.name, _LONGEST)}</text>',
    ]
    start = 0.0
    for value, look, hover in bar.parts:
        left = axis.at(start)
        right = axis.at(start + value)
        shape = f'x="{left:.1f}" y="{top + 21}" width="{right - left:.1f}" height="{_BAR}"'
        drawn.append(f'<rect class="{look}" {shape}><title>{text(hover)}</title></rect>')
        start += value
    if bar.total:
        drawn.append(f'<text class="halo" x="{axis.at(start) + 7:.1f}" y="{top + 34}">{text(bar.total)}</text>')
    return "".join(drawn)
