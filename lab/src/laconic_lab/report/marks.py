"""How a scheme looks in every figure: one colour, one dash, one marker, by its place in the records."""

from __future__ import annotations

_COLOURS = 8  # .s0 to .s7 in style.css
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4")
_MARKERS = (  # around 0, 0; each about as heavy as a circle of radius 4
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.6 -3.6h7.2v7.2h-7.2z",
    "M0 -4.8L4.6 3.4H-4.6z",
    "M0 -5.2L5.2 0L0 5.2L-5.2 0z",
    "M0 4.8L4.6 -3.4H-4.6z",
    "M-4.6 -2h2.6v-2.6h4v2.6h2.6v4h-2.6v2.6h-4v-2.6h-2.6z",
)


def colour(number: int) -> str:
    """The class that sets --ink."""
    return f"s{number % _COLOURS}"


def dash(number: int) -> str:
    """The attribute of a line; 8 colours, 5 dashes and 6 markers repeat together after 120 schemes."""
    pattern = _DASHES[number % len(_DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def marker(number: int, x: float, y: float, hover: str = "") -> str:
    """A scheme's mark at a place; hover is escaped already."""
    title = f"<title>{hover}</title>" if hover else ""
    shape = _MARKERS[number % len(_MARKERS)]
    return f'<path class="mark {colour(number)}" transform="translate({x:.1f} {y:.1f})" d="{shape}">{title}</path>'
