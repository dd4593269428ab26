"""The page of a plan: the answer and its reasons, every row, and step time against link speed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from laconic.cli import number
from laconic.planning import rate_text
from laconic_lab.report.charts import Chart, Curve, Scale, line_chart
from laconic_lab.report.drawing import looks
from laconic_lab.report.markup import figure, frame, heads, numbers_behind, table, text

PLAN = "plan.json"
_MOST_CURVES = 5  # more than that cannot be told apart
_TICKS = (1e6, 1e8, 1e10)  # rates, far enough apart for their names on a phone
_HEAD = ("scheme", "step ms", "waits ms", "MB out", "MB kept", "x steps", "seconds", "x steps from")
_NOTES = (
    "* marks a step that was predicted; the others were really taken.",
    "Seconds are to where bf16 is after the steps that were asked for: step time times steps times x steps.",
    "x steps is how many times the steps of bf16 a scheme needs: median and range; - where that is not known.",
    "Waits is the part of a step in which nothing but the network is waited for.",
    "MB out leave a worker at each step; MB kept are beyond model, gradients and optimizer.",
)


def plan_page(path: Path) -> str:
    """The page, from what `laconic plan --out` wrote, or Plan.as_dict() as JSON."""
    plan = json.loads(path.read_text(encoding="utf-8"))
    workers = plan["workers"]
    sentence = (
        f"Planned in {plan['seconds']:.0f} s for {workers} worker{'s' * (workers != 1)} on links of about "
        f"{rate_text(plan['bits_per_s'])}. What limits: {plan['limit']}."
    )
    body = f"""{_answer(plan)}
{_table(plan)}
<section class="figures">
{_over_links(plan)}
</section>"""
    return frame(f"Plan: {plan['pick']}", sentence, body, _NOTES)


def _answer(plan: Mapping[str, Any]) -> str:
    reasons = list(plan["reasons"])
    reasons += [f"with {name} it would be {other['pick']}" for name, other in plan.get("what_if", {}).items()]
    lines = "".join(f"<li>{text(reason)}</li>" for reason in reasons)
    paste = f'<pre tabindex="0"><code>{text(plan["line"])}</code></pre>'
    return f'<section class="answer">{paste}<ul>{lines}</ul></section>'


def _table(plan: Mapping[str, Any]) -> str:
    rows = []
    for row in plan["rows"]:
        cells = [text(cell) for cell in _cells(row)]
        if row["scheme"] == plan["pick"]:
            cells[:2] = (f"<strong>{cell}</strong>" for cell in cells[:2])
        rows.append(cells)
    return table("Every scheme", [heads(_HEAD)], rows)


def _cells(row: Mapping[str, Any]) -> list[str]:
    source = row["steps_source"].removeprefix(f"{row['scheme']} ")
    factor = "not reached" if source else "-"
    if row["steps_factor"] is not None:
        low, high = (math.inf if end is None else end for end in row["steps_range"])  # JSON has no infinity
        factor = f"{row['steps_factor']:.2f} ({low:.2f} to {high:.2f})"
    return [
        row["scheme"],
        f"{row['step_ms']:,.1f}{'' if row['tried'] else '*'}",
        f"{row['waits_ms']:,.1f}",
        f"{row['bytes_out'] / 1e6:,.3f}",
        f"{row['memory_bytes'] / 1e6:,.1f}",
        factor,
        number(row["seconds_to_target"], ",.0f"),
        source or "-",
    ]


def _over_links(plan: Mapping[str, Any]) -> str:
    shown = _that_matter(plan)
    rates = [rate for rate, _ in plan["curves"][shown[0]]]
    numbers = [
        [rate_text(rate), *(f"{plan['curves'][scheme][place][1]:,.1f}" for scheme in shown)]
        for place, rate in enumerate(rates)
    ]
    return figure(
        "Step time against link speed",
        "What a step would take on other links, all predicted; both axes are logarithmic. The bar along the axis shows "
        f"which scheme reaches a target first: {_winners_text(plan)}.",
        _chart(plan, shown),
        numbers_behind("Milliseconds of a step", ["link", *shown], numbers),
    )


def _that_matter(plan: Mapping[str, Any]) -> list[str]:
    """The pick, bf16, who is soonest to a target on some link, then who is soonest on this one."""
    curves = plan["curves"]
    known = [row["scheme"] for row in plan["rows"] if row["steps_factor"] is not None]
    somewhere = [scheme for scheme, _ in _winners(plan)]
    order = [plan["pick"], *(["bf16"] if "bf16" in curves else []), *somewhere, *known, *curves]
    return list(dict.fromkeys(order))[:_MOST_CURVES]


def _winners(plan: Mapping[str, Any]) -> list[tuple[str, list[float]]]:
    """Who is soonest to a target, and on links of which rates, from slow ones to fast ones."""
    curves: dict[str, list[tuple[float, float]]] = plan["curves"]
    factors: dict[str, float | None] = {row["scheme"]: row["steps_factor"] for row in plan["rows"]}
    known = [scheme for scheme in curves if factors[scheme] is not None] or list(curves)

    def soonest(place: int) -> str:
        return min(known, key=lambda scheme: curves[scheme][place][1] * (factors[scheme] or 1))

    rates = [rate for rate, _ in curves[plan["pick"]]]
    places = sorted(range(len(rates)), key=rates.__getitem__)
    return [(scheme, [rates[place] for place in of]) for scheme, of in groupby(places, soonest)]


def _winners_text(plan: Mapping[str, Any]) -> str:
    *others, (last, _) = _winners(plan)
    if not others:
        return f"{last} on all links"
    return "; ".join([*(f"up to {rate_text(rates[-1])} {scheme}" for scheme, rates in others), f"then {last}"])


def _strip(plan: Mapping[str, Any], numbers: Mapping[str, int]) -> list[tuple[float, int | None, str]]:
    """A bar along the axis of links, in the colours of the schemes that win there; each ends halfway to the next."""
    winners = _winners(plan)
    ends = [math.sqrt(slow[-1] * fast[0]) for (_, slow), (_, fast) in pairwise(winners)]
    return [
        (end, numbers.get(scheme), f"soonest to a target: {scheme}")
        for (scheme, _), end in zip(winners, [*ends, math.inf], strict=True)
    ]


def _chart(plan: Mapping[str, Any], shown: Sequence[str]) -> str:
    here = plan["bits_per_s"]
    curves = [
        Curve(scheme, number, [(rate, ms, f"{scheme} at {rate_text(rate)}: {ms:,.1f} ms") for rate, ms in points])
        for scheme, number in looks(shown).items()
        if (points := plan["curves"][scheme])
    ]
    return line_chart(
        Chart(
            label="Step time over link speed",
            x=Scale("link", rate_text, is_log=True, reaches=[here], ticks=_TICKS),
            y=Scale("ms a step", "{:g}".format, is_log=True),
            strip=_strip(plan, looks(shown)),
            upright=(here, f"yours: {rate_text(here)}"),
            curves=curves,
        )
    )
