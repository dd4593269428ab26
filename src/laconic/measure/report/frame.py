"""The frame of every page: no script, nothing fetched, one style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laconic.measure.report.markup import text

# Nothing is fetched and nothing runs, whatever a record holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = Path(__file__).with_name("style.css")


def frame(title: str, sentence: str, body: str, notes: Sequence[str]) -> str:
    """A whole page: what was run, what came of it (markup), how to read it."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<style>
{_STYLE.read_text(encoding="utf-8")}</style>
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
