"""The page of an inspection: for each step that was looked at a table of fits, and the tail of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from laconic.cli import number
from laconic_lab import records
from laconic_lab.errors import TaskError
from laconic_lab.report.charts import Scale, draw_marks, name_axes, set_scales
from laconic_lab.report.drawing import COLOURS, colour, new_figure, styled, to_svg
from laconic_lab.report.markup import brief_percent, frame, heads, keys, table, text

Fit = Any  # a record of one tensor at one step, as laconic_lab.inspect.Fit wrote it; layer is None for all of them
_LAPLACE = 0  # the look of the law; the samples come after it
_LAW_POINTS = 40
_WIDTH, _LEFT, _BELOW, _PLOT_HEIGHT, _ABOVE = 400, 56, 44, 204, 26
_COLUMNS = ("zeros", "mean |x|", "Laplace", "Gaussian", "t0/exact", "caught/k")
_NOTES = (
    "Gradient is one worker's own, before any exchange. Balance is what memory has kept plus that gradient: "
    "what a selector ranks. Of a parameter that is always sent whole, memory keeps no more than its rounding.",
    "Under Laplace and Gaussian stands the Wasserstein-1 distance between the magnitudes and the fitted law, in "
    "units of mean |x|; bold is the closer law. By chance alone it is about 0.9 / sqrt(entries), so no law is "
    "preferred for fewer than 64 entries.",
    "t0 = mean |x| * ln(N/k) is the threshold that the Laplace foretells for the k largest, exact the k-th largest "
    "itself, and caught/k what t0 would have sent over what was asked for. Selection corrects it to exactly k.",
    "In a drawing the dashed level is k/N: the Laplace crosses it at t0, the entries at the exact threshold. On the "
    "logarithmic scale, and in units of mean |x|, every fitted Laplace is the same straight line.",
)


def fits_page(folder: Path) -> str:
    """The page, from the records of an inspection."""
    setting = SimpleNamespace(**next(records.read(folder, "inspection")))
    fits = [SimpleNamespace(**fact) for fact in records.read(folder, "fit")]
    if not fits:
        raise TaskError(f"{folder / records.RECORDS} holds no fit; let `laconic inspect` end first")
    model = f" {setting.model}" if setting.model else ""
    sentence = (
        f"{setting.task}{model}, trained by {setting.workers} virtual workers under {setting.scheme}: "
        f"{setting.steps} steps, {setting.batch} examples per worker and step, seed {setting.seed}. "
        f"Thresholds are for the largest {brief_percent(setting.rho)}."
    )
    steps = [
        _section(step, [fit for fit in fits if fit.step == step], setting.rho)
        for step in dict.fromkeys(f.step for f in fits)
    ]
    return frame(f"{setting.task}: which law the gradients follow", sentence, "\n".join(steps), _NOTES)


def _name(fit: Fit) -> str:
    return "the whole model as one vector" if fit.layer is None else str(fit.layer)


def _section(step: int, fits: Sequence[Fit], rho: float) -> str:
    kinds = list(dict.fromkeys(fit.of for fit in fits))
    layers: dict[str | None, list[Fit]] = {}
    for fit in fits:
        layers.setdefault(fit.layer, []).append(fit)
    panels = "\n".join(_panel(_name(samples[0]), samples, rho) for samples in layers.values())
    return (
        f"<section>\n<h2>Step {step}</h2>\n{_table(step, kinds, list(layers.values()))}\n"
        f'{_keys(kinds)}\n<div class="figures small">\n{panels}\n</div>\n</section>'
    )


def _table(step: int, kinds: Sequence[str], layers: Sequence[Sequence[Fit]]) -> str:
    upper = heads(("layer", "entries"), ' rowspan="2"') + "".join(
        f'<th scope="colgroup" colspan="{len(_COLUMNS)}">{text(kind)}</th>' for kind in kinds
    )
    rows = [
        [text(_name(fits[0])), f"{fits[0].entries:,}", *(cell for fit in fits for cell in _cells(fit))]
        for fits in layers
    ]
    return table(f"Fits at step {step}", [upper, heads(_COLUMNS) * len(kinds)], rows, ' class="tight"')


def _cells(fit: Fit) -> list[str]:
    laws = [(number(fit.w1_laplace, ".3f"), "laplace"), (number(fit.w1_gaussian, ".3f"), "gaussian")]
    return [
        number(100 * fit.zeros / fit.entries if fit.entries else None, ".1f", " %"),
        f"{fit.mean_abs:.2e}",
        *(f"<strong>{shown}</strong>" if law == fit.closer else shown for shown, law in laws),
        number(fit.threshold_ratio, ".2f"),
        number(fit.caught_ratio, ".2f"),
    ]


def _keys(kinds: Sequence[str]) -> str:
    """The names of the panels' lines."""
    lines = [("line", f"s{place}", kind) for place, kind in enumerate(kinds, 1)]
    lines.append(("line", f"s{_LAPLACE}", "Laplace of either"))
    return keys(lines + [("dashed", f"s{place}", f"Gaussian of the {kind}") for place, kind in enumerate(kinds, 1)])


def _panel(name: str, samples: Sequence[Fit], rho: float) -> str:
    """One layer: P(|x| > t) over t / mean|x|, down to a tenth of the share that is asked for.

    In these units every fitted Laplace is exp(-t), a straight line on the logarithmic scale; where it crosses the
    dashed level is the threshold t0, and where a sample does, the exact one.
    """
    shown = {sample.of: [(t, share) for t, share in sample.tail if share >= rho / 10] for sample in samples}
    drawing = _tails(name, samples, shown, rho) if any(shown.values()) else "<p>every entry is zero</p>"
    ratios = ", ".join(f"{number(sample.threshold_ratio, '.2f')} ({sample.of})" for sample in samples)
    return f"<figure><figcaption><h3>{text(name)}</h3><p>t0/exact: {text(ratios)}</p></figcaption>\n{drawing}</figure>"


@styled
def _tails(name: str, samples: Sequence[Fit], shown: dict[str, list[tuple[float, float]]], rho: float) -> str:
    right = _WIDTH - 8
    height = _BELOW + _PLOT_HEIGHT + _ABOVE
    figure, axes = new_figure(_WIDTH, height, _LEFT, right, _BELOW, _BELOW + _PLOT_HEIGHT)
    ts = [t for points in shown.values() for t, _ in points]
    x = Scale("t / mean |x|", "{:g}".format, reaches=[0.0, 1.1 * math.log(1 / rho)])
    y = Scale("share of entries beyond t", brief_percent, is_log=True, reaches=[rho / 10, 1.0])
    set_scales(axes, x, y, ts, [])
    name_axes(figure, x.name, y.name, right)
    lowest, last = axes.get_ylim()[0], axes.get_xlim()[1]
    level = samples[0].k / samples[0].entries
    if lowest <= level < 1:  # named below the line, where no tail begins
        axes.axhline(level, color=COLOURS["text"], linewidth=1, linestyle=(0, (5, 4)))
        axes.annotate("k/N", (0, level), (6, -16), textcoords="offset points")
    axes.plot(*_law(None, last, lowest), linewidth=1.25, color=colour(_LAPLACE))
    for place, sample in enumerate(samples, 1):
        if sample.mean_abs > 0:
            law = _law(sample.rms / sample.mean_abs, last, lowest)
            axes.plot(*law, linewidth=1.25, color=colour(place), linestyle=(0, (4, 2.4)))
    for place, sample in enumerate(samples, 1):
        if points := shown[sample.of]:
            axes.plot(*zip(*points, strict=True), color=colour(place), clip_on=False)
            hover = f"{sample.of}: {{:.3g}} % of the entries are beyond {{:.2f}} mean |x|"
            draw_marks(axes, place, [(t, share, hover.format(100 * share, t)) for t, share in points[::3]])
    return to_svg(figure, f"Tail of {name}")


def _law(sigma: float | None, last: float, lowest: float) -> tuple[list[float], list[float]]:
    """erfc(t / (sigma*sqrt(2))), or the Laplace's exp(-t) where there is no sigma, down to the bottom of the axis."""
    ts = [last * i / _LAW_POINTS for i in range(_LAW_POINTS + 1)]
    shares = [math.exp(-t) if sigma is None else math.erfc(t / (sigma * math.sqrt(2))) for t in ts]
    places = [(t, share) for t, share in zip(ts, shares, strict=True) if share >= lowest]
    return [t for t, _ in places], [share for _, share in places]
