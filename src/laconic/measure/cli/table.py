"""A table in plain text, the same on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Sequence


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number in a format, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Columns wide enough for their cells: the first ones to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)
