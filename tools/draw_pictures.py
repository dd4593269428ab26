"""Draw the pictures of the documentation: six questions, rounds, curves by seconds, plans, a figure for each paper.

python tools/draw_pictures.py          # writes them; tests/test_docs.py says whether they are up to date
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.trigger import Rounds
from laconic_lab.report.drawing import STYLE_SHEET, looks

DOCS = Path(__file__).parents[1] / "docs"
_RESULTS = DOCS.parent / "results"
_WIDTH = 500  # narrow, so that they can be read on a phone
_BOX_WIDTH, _BOX_HEIGHT = 206, 92
_LEFT, _RIGHT = 38, 284
_ROWS = (20, 160, 300)
_BOXES = (
    (_LEFT, _ROWS[0], "of what?", "attach, follow", "gradient, or drift"),
    (_RIGHT, _ROWS[0], "what is sent?", "select", "exactly k, low rank"),
    (_RIGHT, _ROWS[1], "how is it written?", "quantize, wire", "few bits, in frames"),
    (_LEFT, _ROWS[1], "what is kept?", "memory", "what was not sent"),
    (_RIGHT, _ROWS[2], "where does it go?", "exchange", "all, owners, peers"),
    (_LEFT, _ROWS[2], "when, and then what?", "trigger, outer", "each step, or in rounds"),
)
_ARROWS = (
    ("M244 66 H280", None),
    ("M375 112 V156", None),
    ("M284 206 H248", None),
    ("M145 160 V116", ("added to the next", 155, 141)),
    ("M375 252 V296", None),
    ("M284 346 H248", None),
    ("M38 346 H14 V66 H34", None),
)
_STYLE = """
    .paper { fill: #ffffff } .box { fill: #f2efe8; stroke: #57534a; stroke-width: 1.5 }
    .q { font-size: 14px; fill: #8a5a00; font-weight: 600 } .n { font-size: 17px; fill: #1f1d19; font-weight: 600 }
    .t { font-size: 14px; fill: #45413a } .tick { stroke: #c9c2b4 } .sent { fill: #d9a441; stroke: #57534a }
    .a { stroke: #8a8478; stroke-width: 1.8; fill: none; marker-end: url(#head) }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #16181c } .box { fill: #24272d; stroke: #a8a294 }
      .q { fill: #f0b74a } .n { fill: #f4f1ea } .t { fill: #cdc7ba }
    }
"""
_PANEL_HEIGHT = 260
_COLOURS = ("#57534a", "#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7")  # told apart without red and green
_STYLE += "".join(
    f"    .c{number} {{ stroke: {colour}; stroke-width: 2.4; fill: none }}\n" for number, colour in enumerate(_COLOURS)
)
# The colours that schemes have in reports, too: by day, then by night.
_SCHEMES = re.findall(r"--(s\d): (#\w+);", STYLE_SHEET.read_text(encoding="utf-8"))
_LIGHT, _DARK = (
    "".join(f"    .{name} {{ stroke: {colour} }}\n" for name, colour in half) for half in (_SCHEMES[:8], _SCHEMES[8:])
)
_STYLE += f"    .line {{ stroke-width: 2.4; fill: none }}\n{_LIGHT}"
_STYLE += f"    @media (prefers-color-scheme: dark) {{\n{_DARK}    }}\n"
_UNDER_SGD = "Accuracy against training seconds under SGD, outer steps beside sparse gradients and gossip."
_BY_SECONDS = "Validation loss against training seconds at 1gbit, from step 128 to 640, in five ways to train a GPT."
_STEP_MS = "mean ms a step at 1gbit"
_FORETOLD = (
    "Steps that plans predicted against measured ones, a point for each cell, beside the diagonal and a tenth off it."
)
_QUESTIONS = (
    "One step of a worker: from its gradient or drift a part is selected, written in few bits and exchanged; what was "
    "not sent is kept and added to the next; a trigger says when, and an outer optimizer what follows."
)
_ROUNDS = (
    "Outer steps in eight fragments: every two steps another one is sent, travels while training goes on, and its "
    "result is applied two steps later."
)


def _record(name: str) -> Any:
    return json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def questions() -> str:
    """One step of a worker, as the six questions that a scheme answers."""
    drawn = ""
    for x, y, question, part, words in _BOXES:
        drawn += f'  <rect class="box" x="{x}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8"/>\n'
        for look, below, text in (("q", 27, question), ("n", 51, part), ("t", 75, words)):
            drawn += f'  <text class="{look}" x="{x + 14}" y="{y + below}">{text}</text>\n'
    for path, label in _ARROWS:
        drawn += f'  <path class="a" d="{path}"/>\n'
        if label:
            drawn += f'  <text class="t" x="{label[1]}" y="{label[2]}">{label[0]}</text>\n'
    return _svg(_QUESTIONS, 420, drawn)


def rounds() -> str:
    """When each fragment of `streaming` is sent and applied, over two periods."""
    rule = Rounds(every=16, fragments=8, delay=2)
    left, pitch, row, last = 100, 12, 36, 2 * rule.every
    drawn = '  <text class="n" x="10" y="32">training</text>\n'
    drawn += f'  <rect class="box" x="{left}" y="16" width="{pitch * last}" height="22"/>\n'
    for fragment in range(rule.fragments):
        drawn += f'  <text class="t" x="10" y="{72 + row * fragment}">fragment {fragment + 1}</text>\n'
    for step in range(1, last):
        x = left + pitch * step
        drawn += f'  <path class="tick" d="M{x} 16 V38"/>\n'
        for fragment in rule.fragments_due(step):
            y = 56 + row * fragment
            drawn += f'  <path class="tick" d="M{x} 38 V{y}"/>\n'
            drawn += f'  <rect class="sent" x="{x}" y="{y}" width="{pitch * rule.delay}" height="22"/>\n'
            drawn += f'  <path class="a" d="M{x + pitch * rule.delay} {y} V42"/>\n'
    bottom = 72 + row * rule.fragments
    drawn += f'  <text class="t" x="{left}" y="{bottom}">a bar: in flight; an arrow: applied</text>\n'
    return _svg(_ROUNDS, bottom + 16, drawn)


def under_sgd() -> str:
    """Accuracy against training time under SGD, a panel for each task of the record."""
    drawn, top = "", 0
    for task, curves in _record("outer-under-sgd")["curves"].items():
        drawn += _panel(task, curves, top)
        top += _PANEL_HEIGHT
    for number, scheme in enumerate(curves):
        x, y = 20 + 240 * (number % 2), top + 8 + 22 * (number // 2)
        drawn += f'  <path {_line(scheme, curves)} d="M{x} {y} h24"/>\n'
        drawn += f'  <text class="t" x="{x + 32}" y="{y + 5}">{scheme.partition(",")[0]}</text>\n'
    return _svg(_UNDER_SGD, top + 16 + 22 * (len(curves) // 2), drawn)


def _panel(task: str, curves: Mapping[str, Sequence[tuple[float, float]]], top: int) -> str:
    left, right, low, high = 50, _WIDTH - 16, top + _PANEL_HEIGHT - 52, top + 36
    last = max(seconds for points in curves.values() for seconds, _ in points)
    most = max(accuracy for points in curves.values() for _, accuracy in points)
    drawn = f'  <text class="n" x="{left}" y="{top + 22}">{task}: accuracy</text>\n'
    for percent in range(0, int(100 * most) + 1, 20):
        y = low - (low - high) * percent / 100 / most
        drawn += f'  <path class="tick" d="M{left} {y:.1f} H{right}"/>\n'
        drawn += f'  <text class="t" x="4" y="{y + 5:.1f}">{percent} %</text>\n'
    for quarter in range(1, 5):
        x = left + (right - left) * quarter / 4
        drawn += f'  <text class="t" x="{x:.0f}" y="{low + 22}" text-anchor="end">{last * quarter / 4:.0f} s</text>\n'
    for scheme, points in curves.items():
        places = " L".join(
            f"{left + (right - left) * seconds / last:.1f} {low - (low - high) * accuracy / most:.1f}"
            for seconds, accuracy in points
        )
        drawn += f'  <path {_line(scheme, curves)} d="M{places}"/>\n'
    return drawn


def _line(scheme: str, schemes: Iterable[str]) -> str:
    """A line in the colour that the scheme has in reports, too."""
    return f'class="line s{looks(schemes)[scheme] % 8}"'


def loss_by_seconds() -> str:
    """Validation loss against training seconds on a logarithmic axis, of the runs whose step was timed."""
    rows = {row["run"]: row for row in _record("nanogpt-640")["rows"]}
    steps = (128, 256, 384, 512, 640)
    curves = {
        name: [(at * rows[run][_STEP_MS] / 1e3, rows[run][f"loss at {at}"]) for at in steps]
        for name, run in (
            ("muloco, Muon", "muloco:every=16,fragments=4,delay=4, muon, rate x 2"),
            ("streaming, AdamW", "streaming, adamw, rate x 2"),
            ("local, AdamW", "local:every=16, adamw, rate x 2"),
            ("bf16, Muon", "dense, muon, rate x 2"),
            ("bf16, AdamW", "dense, adamw, rate x 2"),
        )
    }
    left, right, low, high = 44, _WIDTH - 16, 226, 36
    first, last, least, most = 4.0, 2000.0, 1.4, 2.45

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / first) / math.log(last / first)
        return left + (right - left) * across, low - (low - high) * (y - least) / (most - least)

    drawn = f'  <text class="n" x="{left}" y="22">validation loss</text>\n'
    for loss in (1.6, 2.0, 2.4):
        y = place(first, loss)[1]
        drawn += f'  <path class="tick" d="M{left} {y:.1f} H{right}"/>\n'
        drawn += f'  <text class="t" x="10" y="{y + 5:.1f}">{loss}</text>\n'
    for mark in (10, 30, 100, 300, 1000):
        x = place(mark, most)[0]
        drawn += f'  <path class="tick" d="M{x:.1f} {low} V{high}"/>\n'
        drawn += f'  <text class="t" x="{x:.1f}" y="{low + 20}" text-anchor="middle">{mark} s</text>\n'
    for number, (scheme, points) in enumerate(curves.items()):
        ends = [place(*point) for point in points]
        drawn += f'  <path {_line(scheme, curves)} d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in ends)}"/>\n'
        for x, y in ends:
            drawn += f'  <circle {_line(scheme, curves)} cx="{x:.1f}" cy="{y:.1f}" r="4"/>\n'
        x, y = 20 + 240 * (number % 2), low + 46 + 22 * (number // 2)
        drawn += f'  <path {_line(scheme, curves)} d="M{x} {y} h24"/>\n'
        drawn += f'  <text class="t" x="{x + 32}" y="{y + 5}">{scheme}</text>\n'
    return _svg(_BY_SECONDS, low + 56 + 22 * ((len(curves) - 1) // 2), drawn)


def foretold() -> str:
    """Predicted steps against measured ones on logarithmic axes: a point a cell of the record, a colour a model."""
    cells = _record("plan-cells")["rows"]
    left, right, low, high = 62, _WIDTH - 16, 400, 16
    steps = [cell[f"step ms, {side}"] for cell in cells for side in ("measured", "foretold")]
    first, last = min(steps) / 1.2, max(steps) * 1.2

    def place(ms: float, begin: float, end: float) -> float:
        return begin + (end - begin) * math.log(ms / first) / math.log(last / first)

    drawn = ""
    for ms in [ms for ms in (20, 50, 100, 200, 500, 1000, 2000, 5000, 10000) if first < ms < last]:
        x, y = place(ms, left, right), place(ms, low, high)
        drawn += f'  <path class="tick" d="M{left} {y:.1f} H{right} M{x:.1f} {low} V{high}"/>\n'
        drawn += f'  <text class="t" x="{left - 8}" y="{y + 5:.1f}" text-anchor="end">{ms}</text>\n'
        drawn += f'  <text class="t" x="{x:.1f}" y="{low + 20}" text-anchor="middle">{ms}</text>\n'
    for factor in (1 / 1.1, 1.0, 1.1):
        ends = [(ms, ms * factor) for ms in (first * 1.1, last / 1.1)]
        line = " L".join(f"{place(x, left, right):.1f} {place(y, low, high):.1f}" for x, y in ends)
        drawn += f'  <path class="tick" stroke-width="{2 if factor == 1 else 1}" d="M{line}"/>\n'
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    for cell in cells:
        x, y = place(cell["step ms, measured"], left, right), place(cell["step ms, foretold"], low, high)
        drawn += f'  <circle class="c{models.index(cell["model"])}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>\n'
    axes = "measured, ms a step (upwards: predicted)"
    drawn += f'  <text class="t" x="{right}" y="{low + 42}" text-anchor="end">{axes}</text>\n'
    for number, model in enumerate(models):
        x = 20 + 96 * number
        drawn += f'  <circle class="c{number}" cx="{x}" cy="{low + 66}" r="3.5"/>\n'
        drawn += f'  <text class="t" x="{x + 10}" y="{low + 71}">{model}</text>\n'
    return _svg(_FORETOLD, low + 86, drawn)


def _bars(label: str, title: str, groups: Mapping[str, Mapping[str, float]], digits: int) -> str:
    """A bar for each figure of each group, with its name before it, of which the part to a comma gives its colour."""
    left, right, row = 176, _WIDTH - 64, 22
    longest = max(figure for figures in groups.values() for figure in figures.values())
    names = list(dict.fromkeys(name.partition(",")[0] for figures in groups.values() for name in figures))
    drawn, y = f'  <text class="n" x="10" y="24">{title}</text>\n', 40
    for group, figures in groups.items():
        if group:
            drawn += f'  <text class="q" x="10" y="{y + 14}">{group}</text>\n'
            y += row
        for name, figure in figures.items():
            end = left + max(1.0, (right - left) * figure / longest)
            drawn += f'  <text class="t" x="{left - 8}" y="{y + 15}" text-anchor="end">{name}</text>\n'
            line = _line(name.partition(",")[0], names)
            drawn += f'  <path {line} style="stroke-width:14" d="M{left} {y + 10} H{end:.1f}"/>\n'
            drawn += f'  <text class="t" x="{end + 6:.1f}" y="{y + 15}">{figure:.{digits}f}</text>\n'
            y += row
        y += 6
    return _svg(label, y + 4, drawn)


def answers_of_a_server() -> str:
    """Bytes of a server's answers by number of workers: plain top-k, with a score, and cut."""
    schemes = {
        "topk:rho=0.01,exchange=server": "plain top-k",
        "overlap:rho=0.01,score=product,down_rho=0": "with a score",
        "topk:rho=0.01,exchange=server(down_rho=0.03)": "plain, cut",
    }
    groups: dict[str, dict[str, float]] = {f"{number} workers": {} for number in (8, 16, 32, 64)}
    for row in _record("unions")["rows"]:
        if row["labels"] == "all" and row["scheme"] in schemes:
            groups[f"{row['workers']} workers"][schemes[row["scheme"]]] = row["server MB out a step"]
    return _bars(
        "Megabytes that a server sends at a step, by number of workers, in bars: plain top-k, with a score, and cut.",
        "MB that a server sends a step",
        {group: {name: figures[name] for name in schemes.values()} for group, figures in groups.items()},
        1,
    )


def laws_of_layers() -> str:
    """How far what a selector ranks is from a Laplace and a Gaussian law, by layer and step."""
    groups = {
        f"{row['layer'] or 'whole model'}, step {row['step']}": {
            "from Laplace": row["w1_laplace"],
            "from Gaussian": row["w1_gaussian"],
        }
        for row in _record("laplace-fit")["rows"]
        if row["of"] == "balance" and row["layer"] in ("2.weight", "6.weight", "8.weight", None)
    }
    return _bars(
        "Wasserstein distances of what a selector ranks from a Laplace and a Gaussian law, by layer and step, in bars.",
        "Wasserstein-1 distance over mean |x|",
        groups,
        2,
    )


def steps_of_integers() -> str:
    """What a step of VGG-16 takes at 1gbit under each way to write its gradient."""
    names = {
        "dense": "fp32",
        "torch-fp16": "fp16 hook",
        "maxnorm:levels=63,block=0,stages=1": "maxnorm, published",
        "maxnorm:bits=4": "maxnorm:bits=4",
        "multiscale:bits=4": "multiscale:bits=4",
        "randk-maxnorm:rho=0.1": "randk, rho = 0.1",
        "torch-powersgd:rank=4": "PowerSGD hook, rank 4",
    }
    rows = {row["scheme"]: row["step_ms"] for row in _record("integers-vgg16-lab")["rows"]}
    figures = {name: rows[scheme] for scheme, name in names.items()}
    return _bars("Milliseconds a step of VGG-16 on four hosts at 1gbit, in bars.", "ms a step", {"": figures}, 0)


def costs_of_gossip() -> str:
    """How many points gossip of few bytes is behind gossip at every step, after few steps and after many."""
    groups: dict[str, dict[str, float]] = {}
    for steps, name in (("150", "gossip-change-rate"), ("600", "gossip-change")):
        every, *others = _record(name)["rows"]
        for row in others:
            code = "4 bits" if "modulo" in row["scheme"] else "float32"
            what = "changed" if "change" in row["scheme"] else "period"
            bytes_sent = f"{what}, {100 * row['share']:.1f} %"
            groups.setdefault(f"{code}, after {steps} steps", {})[bytes_sent] = every["accuracy"] - row["accuracy"]
    return _bars(
        "Points of accuracy behind gossip at every step, by share of its bytes: what has changed, and a fixed period.",
        "points behind gossip at every step",
        groups,
        2,
    )


def accuracy_of_votes() -> str:
    """Accuracy under votes of all signs and of few, for like data, unlike data and workers that send false signs."""
    cases = {
        "votes": "like data",
        "votes-unlike": "two labels a worker",
        "votes-one-label": "one label a worker",
        "votes-flipped": "4 of 10 send the wrong sign",
    }
    schemes = {"sign": "all signs", "sparse-sign:rho=0.1": "a tenth"}
    schemes["sparse-sign:rho=0.1,vote=weighted"] = "a tenth, weighted"
    groups = {
        case: {schemes[row["scheme"]]: row["accuracy"] for row in _record(name)["rows"] if row["scheme"] in schemes}
        for name, case in cases.items()
    }
    return _bars(
        "Accuracy in per cent under votes of all signs and of a tenth of them, in four cases, in bars.",
        "accuracy after 160 steps, %",
        groups,
        1,
    )


def _svg(label: str, height: int, drawn: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="ui-sans-serif, system-ui, sans-serif" role="img" aria-label="{label}">\n'
        f"  <style>{_STYLE}  </style>\n"
        '  <defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#8a8478"/></marker></defs>\n'
        f'  <rect class="paper" width="{_WIDTH}" height="{height}"/>\n{drawn}</svg>\n'
    )


PICTURES = {
    DOCS / "six-questions.svg": questions,
    DOCS / "rounds.svg": rounds,
    DOCS / "under-sgd.svg": under_sgd,
    DOCS / "foretold.svg": foretold,
    DOCS / "loss-by-seconds.svg": loss_by_seconds,
    DOCS / "papers-overlap.svg": answers_of_a_server,
    DOCS / "papers-laplace.svg": laws_of_layers,
    DOCS / "papers-integers.svg": steps_of_integers,
    DOCS / "papers-gossip.svg": costs_of_gossip,
    DOCS / "papers-votes.svg": accuracy_of_votes,
}

if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw(), encoding="utf-8")
