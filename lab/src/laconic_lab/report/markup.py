"""Pieces of HTML, and the frame of every page. Every text from the records passes through `text`."""

from __future__ import annotations

import html
from collections.abc import Sequence

from laconic.cli import number
from laconic_lab.report.drawing import STYLE_SHEET

# Nothing is fetched and nothing runs, whatever a record holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def text(value: object) -> str:
    """A text that is only a text, also inside a quoted attribute."""
    return html.escape(str(value))


def short(name: str, length: int) -> str:
    """The name, its middle left out where it is longer than there is room."""
    half = (length - 1) // 2
    return name if len(name) <= length else f"{name[: length - 1 - half]}…{name[-half:]}"


def percent(value: float | None) -> str:
    """A share as a percentage, to a hundredth."""
    return number(None if value is None else 100 * value, ".2f", " %")


def brief_percent(value: float) -> str:
    """A share as a percentage, with no more digits than it needs; it never breaks before the sign."""
    return f"{100 * value:.4g}\N{NO-BREAK SPACE}%"


def quartiles(pair: Sequence[float] | None) -> str:
    """The first and third quartile."""
    return "-" if pair is None else f"{pair[0]:.1f} to {pair[1]:.1f}"


def si_bytes(value: float) -> str:
    """A round number of bytes for an axis: 20 kB, 5 GB."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g} B"


def heads(names: Sequence[str], attributes: str = "") -> str:
    """The cells of a table's head."""
    return "".join(f'<th scope="col"{attributes}>{text(name)}</th>' for name in names)


def table(label: str, head_rows: Sequence[str], rows: Sequence[Sequence[str]], attributes: str = "") -> str:
    """A table, of cells that are markup, that scrolls in a box of its own; the keyboard reaches it.

    The first cell of a row names it.
    """
    head = "".join(f"<tr>{cells}</tr>" for cells in head_rows)
    lines = [
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    ]
    body = f"<table{attributes}><thead>{head}</thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}">{body}</div>'


def numbers_behind(label: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The numbers of a figure, folded away; the first column names the row."""
    shown = table(label, [heads(head)], [[text(cell) for cell in row] for row in rows])
    return f"<details><summary>The numbers</summary>{shown}</details>"


def keys(looks: Sequence[tuple[str, str, str]]) -> str:
    """The parts of a drawing by name: (solid, line or dashed; a colour of style.css; name)."""
    items = [
        f'<li><span class="key {kind}" style="--ink: var(--{colour})"></span>{text(name)}</li>'
        for kind, colour, name in looks
    ]
    return f'<ul class="keys">{"".join(items)}</ul>'


def figure(title: str, caption: str, drawing: str, numbers: str, *, is_wide: bool = False) -> str:
    """A drawing under its title, with its numbers behind it."""
    head = f"<figcaption><h2>{text(title)}</h2><p>{text(caption)}</p></figcaption>"
    return f"<figure{' class=wide' * is_wide}>{head}\n{drawing}\n{numbers}</figure>"


def frame(title: str, sentence: str, body: str, notes: Sequence[str], *, refresh_s: int | None = None) -> str:
    """A whole page: what was run, what came of it (markup), how to read it; one that is loaded again while it grows."""
    refresh = "" if refresh_s is None else f'\n<meta http-equiv="refresh" content="{refresh_s}">'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<style>
{STYLE_SHEET.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<header>
<h1>{text(title)}</h1>
<p>{text(sentence)}</p>
</header>
{body}
<section class="notes">
<h2>How to read this</h2>
<ul>{"".join(f"<li>{text(note)}</li>" for note in notes)}</ul>
</section>
</main>
</body>
</html>
"""
