"""The page of `laconic bench union`: the size of unions and a server's bytes against the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laconic_lab import records
from laconic_lab.report.charts import Chart, Curve, Scale, line_chart
from laconic_lab.report.markup import brief_percent, figure, frame, numbers_behind, si_bytes

_NOTES = (
    "U is the union of the workers' choices, k what each of them sends; the server answers |U| entries to each.",
    "Each point is a training run of its own under that score, all workers in one process; the first two steps, in "
    "which there is no past yet, are left out.",
    "Bytes are those of the answers, once for each worker: what leaves a dedicated server in a step.",
)


def unions_page(folder: Path) -> str:
    """The page, from the records."""
    setting = next(records.read(folder, "unions"))
    points = list(records.read(folder, "union"))
    sentence = (
        f"{setting['task']}, {setting['steps']} steps of {setting['batch']} examples per worker, "
        f"seed {setting['seed']}; each worker sends {brief_percent(setting['rho'])} of its entries."
    )
    rows = [
        [point["score"], str(point["workers"]), f"{point['union']:.2f}", f"{point['independent']:.2f}"]
        + [f"{point[name]:,}" for name in ("server_bytes_out", "server_bytes_in")]
        for point in points
    ]
    head = ["score", "workers", "|U|/k", "independent", "bytes out a step", "bytes in"]
    figures = [
        figure(
            "Union against workers",
            "|U|/k by score; both axes are logarithmic.",
            _chart(points, "union", "|U|/k", "{:g}".format),
            numbers_behind("Unions", head, rows),
        ),
        figure(
            "A server's bytes against workers",
            "What leaves the server in a step; both axes are logarithmic.",
            _chart(points, "server_bytes_out", "bytes out a step", si_bytes),
            "",
        ),
    ]
    body = '<section class="figures">\n' + "\n".join(figures) + "\n</section>"
    return frame(f"{setting['task']}: how unions grow", sentence, body, _NOTES)


def _chart(points: Sequence[dict[str, Any]], quantity: str, name: str, form: Callable[[float], str]) -> str:
    curves = []
    for number, score in enumerate(dict.fromkeys(point["score"] for point in points)):
        places = sorted(
            (p["workers"], p[quantity], f"{score}, {p['workers']} workers: {form(p[quantity])}")
            for p in points
            if p["score"] == score and p[quantity]
        )
        curves += [Curve(score, number, places)] if places else []
    if not curves:
        return ""
    workers = Scale("workers", "{:g}".format, is_log=True, ticks=sorted({p["workers"] for p in points}))
    return line_chart(Chart(f"{name} over workers", workers, Scale(name, form, is_log=True), curves=curves))
