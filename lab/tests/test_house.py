"""The lab as a guest of the library: public names alone, and no circle of its own."""

from __future__ import annotations

import ast
import importlib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

LAB = Path(__file__).parents[1]
SOURCE = LAB / "src"
FILES = sorted([*SOURCE.rglob("*.py"), *(LAB / "tests").rglob("*.py")])
FACES = {
    "laconic",
    *(
        f"laconic.{room}"
        for room in (
            *(
                "cli",
                "errors",
                "kernels",
                "layout",
                "optim",
                "planning",
                "recipes",
                "replicas",
                "scheme",
                "select",
                "server",
            ),
            *("session", "testing", "transport", "wire"),
        )
    ),
}


def _imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of all that a file imports as it is loaded or later; no name where a module is imported whole."""
    pairs: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            pairs += [(node.module or "", alias.name) for alias in node.names]
    return pairs


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LAB)))
def test_only_public_names_of_the_library_are_imported(path: Path) -> None:
    for module, name in _imports(path):
        if module == "laconic" or module.startswith("laconic."):
            whole = f"{module}.{name}"
            assert module in FACES, f"{path} imports {whole}: not from the face of a room"
            assert not name.startswith("_") or name == "__version__", f"{path} imports {whole}, which is private"
            if module == "laconic" and name and whole not in FACES:
                assert name in (*importlib.import_module("laconic").__all__, "__version__"), f"{whole} is not public"


def _loaded(path: Path, known: dict[str, Path]) -> set[Path]:
    """The files of the lab that a file needs while it is loaded, type hints apart: those at its top level."""
    needed: set[Path] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        needed |= {known[name] for name in names if name in known}
    return needed - {path}


def test_no_file_is_in_an_import_circle() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    known = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    graph = {path: _loaded(path, known) for path in files}
    # Who imports a file of a room does not ask its face, which shows that file.
    for path, needed in graph.items():
        graph[path] = {other for other in needed if other.name != "__init__.py" or other.parent != path.parent}
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(files)
