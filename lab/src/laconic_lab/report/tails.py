"""Small multiples: the share of entries beyond each magnitude, against the two fitted laws."""

from __future__ import annotations

import math
from collections.abc import Sequence

from laconic_lab.report import marks
from laconic_lab.report.axis import Axis, linear, logarithmic
from laconic_lab.report.inspected import Fit
from laconic_lab.report.lines import grid, svg
from laconic_lab.report.markup import brief_percent, number, text

_WIDTH = 400
_LEFT = 56
_TOP = 26
_BOTTOM = 230
_LAPLACE = 0  # the look of the law; the samples come after it
_LAW_POINTS = 40


def keys(kinds: Sequence[str]) -> str:
    """What each line of the panels is."""
    drawn = [(f'<path class="line {marks.colour(place)}" d="M0 7H14"/>', kind) for place, kind in enumerate(kinds, 1)]
    drawn.append((f'<path class="law {marks.colour(_LAPLACE)}" d="M0 7H14"/>', "Laplace of either"))
    for place, kind in enumerate(kinds, 1):
        drawn.append((f'<path class="law dashed {marks.colour(place)}" d="M0 7H14"/>', f"Gaussian of the {kind}"))
    items = "".join(
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{shape}</svg>{text(name)}</li>' for shape, name in drawn
    )
    return f'<ul class="keys">{items}</ul>'


def panel(name: str, samples: Sequence[Fit], rho: float) -> str:
    """One layer: P(|x| > t) over t / mean|x|, down to a tenth of the share that is asked for.

    In these units every fitted Laplace is exp(-t), a straight line on the logarithmic scale; where it crosses the
    dashed level is the threshold t0, and where a sample does, the exact one.
    """
    floor = rho / 10
    shown = {s.of: [(t, share) for t, share in s.tail if share >= floor] for s in samples}
    ends = [t for points in shown.values() for t, _ in points]
    if ends:
        x = linear("t / mean |x|", [0.0, max([*ends, 1.1 * math.log(1 / rho)])], _LEFT, _WIDTH - 8, "{:g}".format)
        y = logarithmic("share of entries beyond t", [floor, 1.0], _BOTTOM, _TOP, brief_percent)
        drawing = svg(f"Tail of {name}", _BOTTOM + 44, _inside(samples, shown, x, y), width=_WIDTH)
    else:
        drawing = svg(f"Tail of {name}", 24, '<text x="0" y="15">every entry is zero</text>', width=_WIDTH)
    ratios = ", ".join(f"{number(s.threshold_ratio, '.2f')} ({s.of})" for s in samples)
    caption = f"t0/exact: {ratios}"
    return f"<figure><figcaption><h3>{text(name)}</h3><p>{text(caption)}</p></figcaption>\n{drawing}</figure>"


def _inside(samples: Sequence[Fit], shown: dict[str, list[tuple[float, float]]], x: Axis, y: Axis) -> str:
    first = samples[0]
    level = first.k / first.entries
    parts = [grid(x, y)]
    if y.lo <= level < 1:  # named below the line, where no tail begins
        parts.append(f'<path class="level" d="M{x.start} {y.at(level):.1f}H{x.end}"/>')
        parts.append(f'<text x="{x.start + 6}" y="{y.at(level) + 16:.1f}">k/N</text>')
    parts.append(_law(None, x, y, f"law {marks.colour(_LAPLACE)}"))
    for place, one in enumerate(samples, 1):
        if one.mean_abs > 0:
            parts.append(_law(one.rms / one.mean_abs, x, y, f"law dashed {marks.colour(place)}"))
    for place, one in enumerate(samples, 1):
        if shown[one.of]:
            at = [(x.at(t), y.at(share)) for t, share in shown[one.of]]
            parts.append(f'<path class="line {marks.colour(place)}" d="{_path(at)}"/>')
            for (t, share), (at_x, at_y) in list(zip(shown[one.of], at, strict=True))[::3]:
                hover = f"{one.of}: {100 * share:.3g} % of the entries are beyond {t:.2f} mean |x|"
                parts.append(marks.marker(place, at_x, at_y, text(hover)))
    return "".join(parts)


def _law(sigma: float | None, x: Axis, y: Axis, look: str) -> str:
    """erfc(t / (sigma*sqrt(2))), or the Laplace's exp(-t) where there is no sigma, down to the bottom of the axis."""
    ts = [x.hi * i / _LAW_POINTS for i in range(_LAW_POINTS + 1)]
    shares = [math.exp(-t) if sigma is None else math.erfc(t / (sigma * math.sqrt(2))) for t in ts]
    places = [(x.at(t), y.at(share)) for t, share in zip(ts, shares, strict=True) if share >= y.lo]
    return f'<path class="{look}" d="{_path(places)}"/>'


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{at_x:.1f} {at_y:.1f}" for at_x, at_y in places)
