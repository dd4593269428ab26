"""Matplotlib in the style of the pages: its figures as SVG that stands in HTML, with the colours of style.css.

A drawing is in pixels of a desk's screen. On a phone the page shows it smaller, with larger letters.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec
from xml.etree import ElementTree

if TYPE_CHECKING:  # imported where a figure is made: half a second that `laconic train` has no use for
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
STYLE_SHEET = Path(__file__).with_name("style.css")
_COLOUR = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")
# The names of the light colours; in a page each becomes var(--name), so that dark ones take their place.
COLOURS: dict[str, str] = dict(reversed(_COLOUR.findall(STYLE_SHEET.read_text(encoding="utf-8"))))
_NAMES = {colour: name for name, colour in COLOURS.items()}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "path.simplify": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that places are the same everywhere; pages have their own
    "font.size": 13,
    "text.color": COLOURS["quiet"],
    "text.parse_math": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": COLOURS["quiet"],
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 1,
    "lines.linewidth": 2,
    "xtick.color": COLOURS["quiet"],
    "ytick.color": COLOURS["quiet"],
    "xtick.major.size": 5,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,
    "ytick.major.pad": 7,
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
}
CLASSES = ("axis-name", "halo", "name")  # of style.css, given to an artist by set_gid
_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_KEPT = ("fill", "fill-opacity", "opacity", "stroke", "stroke-width", "stroke-dasharray", "text-anchor")

_NUM_COLOURS = 8
_DASHES: tuple[Any, ...] = ("-", (0, (3.5, 1.5)), (0, (1, 1.5)), (0, (4.5, 1.5, 1, 1.5)), (0, (6, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_USUAL = ("dense", "bf16", "topk", "torch-powersgd", "local", "overlap", "diloco", "streaming")


def looks(schemes: Iterable[str]) -> dict[str, int]:
    """A number for each scheme, which is its colour, dash and marker: the usual ones have theirs on every page.

    A number that another scheme of the page has already makes place for the next; 8 colours, 5 dashes and 6 markers
    repeat together after 120.
    """
    numbers: dict[str, int] = {}
    for scheme in schemes:
        name = scheme.partition(":")[0]
        number = _USUAL.index(name) if name in _USUAL else zlib.crc32(name.encode("utf-8", "replace")) % _NUM_COLOURS
        taken = set(numbers.values())
        while number in taken:
            number += 1
        numbers[scheme] = number
    return numbers


def colour(number: int) -> str:
    """The colour of a scheme."""
    return COLOURS[f"s{number % _NUM_COLOURS}"]


def dash(number: int) -> Any:
    """The line style of a scheme."""
    return _DASHES[number % len(_DASHES)]


def marker(number: int) -> str:
    """The marker of a scheme."""
    return _MARKERS[number % len(_MARKERS)]


def styled(draw: Callable[P, str]) -> Callable[P, str]:
    """Let what a function draws have the style of the pages."""

    @functools.wraps(draw)
    def in_style(*arguments: P.args, **options: P.kwargs) -> str:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*arguments, **options)

    return in_style


def new_figure(
    width: float, height: float, left: float, right: float, bottom: float, top: float
) -> tuple[Figure, Axes]:
    """A figure of so many pixels, and its axes between these, counted from below and from the left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    return figure, figure.add_axes((left / width, bottom / height, (right - left) / width, (top - bottom) / height))


def to_svg(figure: Figure, label: str) -> str:
    """The figure as an element of a page; the url of an artist becomes what is shown where the mouse rests on it."""
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's font may have what DejaVu lacks
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    shapes = {f"#{path.get('id')}": path for path in root.iter(f"{_SVG}path") if path.get("id")}
    width, height = (round(float(str(root.get(side)).removesuffix("pt"))) for side in ("width", "height"))
    drawing = ElementTree.Element(
        "svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": printable(label)}
    )
    drawing.extend(_cleaned(root, shapes))
    return str(ElementTree.tostring(drawing, encoding="unicode", short_empty_elements=False))


def printable(text: str) -> str:
    """The text as XML may hold it."""
    return "".join(letter if letter.isprintable() or letter == "\N{NO-BREAK SPACE}" else "?" for letter in text)


def _cleaned(parent: ElementTree.Element, shapes: dict[str, ElementTree.Element]) -> list[ElementTree.Element]:
    """The children of an element without what HTML has no use for: groups, definitions, names, fonts."""
    kept: list[ElementTree.Element] = []
    for child in parent:
        tag = child.tag.removeprefix(_SVG)
        if tag == "g":
            inside = _cleaned(child, shapes)
            for element in inside:
                if child.get("id") in CLASSES:
                    element.set("class", str(child.get("id")))
            kept += inside
        elif tag == "a":
            group = ElementTree.Element("g")
            ElementTree.SubElement(group, "title").text = child.get(_HREF)
            group.extend(_cleaned(child, shapes))
            kept.append(group)
        elif tag in ("path", "text", "use") and (made := _shape(child, tag, shapes)) is not None:
            kept.append(made)
    return kept


def _shape(source: ElementTree.Element, tag: str, shapes: dict[str, ElementTree.Element]) -> ElementTree.Element | None:
    style = dict(pair.split(": ", 1) for pair in (source.get("style") or "").split("; ") if ": " in pair)
    made = ElementTree.Element("path" if tag == "use" else tag)
    if tag == "text":
        made.text = source.text
        made.attrib.update({axis: _short(str(source.get(axis))) for axis in ("x", "y")})
    elif tag == "use":
        shape = shapes[str(source.get(_HREF))]
        made.set("d", _short(str(shape.get("d"))))
        made.set("transform", _short(f"translate({source.get('x')} {source.get('y')})"))
    else:
        made.set("d", _short(str(source.get("d"))))
    shown = {name: _NAMES.get(value, value) for name, value in style.items() if name in _KEPT}
    if tag != "text" and shown.get("fill", "") in ("none", "") and "stroke" not in shown:
        return None  # a background without a colour
    for name, value in shown.items():
        if (name, value) != ("fill", "quiet"):  # the page's own for a drawing
            made.set(name, f"var(--{value})" if value in COLOURS else value)
    return made


def _short(numbers: str) -> str:
    """Without line ends, and to a tenth of a pixel."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), " ".join(numbers.split()))
