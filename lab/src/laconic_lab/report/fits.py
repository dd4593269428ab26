"""The page of an inspection: for each step that was looked at a table of fits, and the tail of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laconic_lab.report.inspected import Fit, read_inspection
from laconic_lab.report.markup import brief_percent, frame, number, scroll_box, text
from laconic_lab.report.tails import keys, panel

_COLUMNS = ("zeros", "mean |x|", "Laplace", "Gaussian", "t0/exact", "caught/k")
_NOTES = (
    "Gradient is one worker's own, before any exchange. Balance is what memory still owes plus that gradient: "
    "what a selector ranks. A parameter that always goes whole owes no more than its rounding.",
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
    asked, fits = read_inspection(folder)
    model = f" {asked.model}" if asked.model else ""
    sentence = (
        f"{asked.task}{model}, trained by {asked.workers} virtual workers under {asked.scheme}: {asked.steps} steps, "
        f"{asked.batch} examples per worker and step, seed {asked.seed}. "
        f"Thresholds are for the largest {brief_percent(asked.rho)}."
    )
    steps = [
        _section(step, [fit for fit in fits if fit.step == step], asked.rho)
        for step in dict.fromkeys(f.step for f in fits)
    ]
    return frame(f"{asked.task}: which law the gradients follow", sentence, "\n".join(steps), _NOTES)


def _section(step: int, fits: Sequence[Fit], rho: float) -> str:
    kinds = list(dict.fromkeys(fit.of for fit in fits))
    layers: dict[str | None, list[Fit]] = {}
    for fit in fits:
        layers.setdefault(fit.layer, []).append(fit)
    panels = "\n".join(panel(mine[0].name, mine, rho) for mine in layers.values())
    return (
        f"<section>\n<h2>Step {step}</h2>\n{_table(step, kinds, list(layers.values()))}\n"
        f'{keys(kinds)}\n<div class="figures small">\n{panels}\n</div>\n</section>'
    )


def _table(step: int, kinds: Sequence[str], layers: Sequence[Sequence[Fit]]) -> str:
    upper = '<th scope="col" rowspan="2">layer</th><th scope="col" rowspan="2">entries</th>' + "".join(
        f'<th scope="colgroup" colspan="{len(_COLUMNS)}">{text(kind)}</th>' for kind in kinds
    )
    lower = "".join(f'<th scope="col">{text(name)}</th>' for name in _COLUMNS) * len(kinds)
    lines = [
        f'<tr><th scope="row">{text(mine[0].name)}</th><td>{mine[0].entries:,}</td>{"".join(map(_cells, mine))}</tr>'
        for mine in layers
    ]
    head = f"<thead><tr>{upper}</tr><tr>{lower}</tr></thead>"
    body = "\n".join(lines)
    return scroll_box(f"Fits at step {step}", f'<table class="tight">{head}<tbody>\n{body}\n</tbody></table>')


def _cells(fit: Fit) -> str:
    laws = [(number(fit.w1_laplace, ".3f"), "laplace"), (number(fit.w1_gaussian, ".3f"), "gaussian")]
    cells = [
        number(100 * fit.zeros / fit.entries if fit.entries else None, ".1f", " %"),
        f"{fit.mean_abs:.2e}",
        *(f"<strong>{shown}</strong>" if law == fit.closer else shown for shown, law in laws),
        number(fit.threshold_ratio, ".2f"),
        number(fit.caught_ratio, ".2f"),
    ]
    return "".join(f"<td>{cell}</td>" for cell in cells)
