"""The shape of the code: parts answer for themselves, paths and transports are whole."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import get_args

import pytest
import torch.optim.optimizer as torch_optimizer

import laconic
from files_passed import functions_passed
from laconic import exchange, kernels, memory, quantize, select, trigger

SOURCE = Path(laconic.__file__).parent
PARTS = (select, quantize, memory, trigger, exchange)
TABLES = (
    select.SELECTORS,
    quantize.QUANTIZERS,
    quantize.GRIDS,
    quantize.MODULO_CODES,
    memory.MEMORIES,
    trigger.SCHEDULES,
    trigger.GOSSIP_TRIGGERS,
    trigger.ROUNDS,
    exchange.PATTERNS,
)
ENDS = {"select", "quantize", "memory", "exchange", "trigger", "pattern"}  # of an expression that is a part
MOST_QUESTIONS = 18
MOST_PRIVATE_NAMES = 17
OF_OTHERS = {"_dynamo", "_exit", "_replace"}  # torch's, and Python's own

WHOLE = ("paths", "transport", "server", "session")


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _in_file(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def _types_of_parts() -> set[str]:
    """The classes in the parts' tables, their bases, and the protocols and unions that their rooms show."""
    types: set[type] = set()
    for table in TABLES:
        for part in table.values():
            types |= {base for base in part.__mro__ if base.__module__.startswith("laconic.")}
    names = {one.__name__ for one in types}
    for room in PARTS:
        names |= {name for name, shown in _shown(room) if _is_protocol(shown) or types & set(get_args(shown))}
    return names


def _shown(room: ModuleType) -> list[tuple[str, object]]:
    return [(name, shown) for name, shown in vars(room).items() if isinstance(shown, type | UnionType)]


def _is_protocol(shown: object) -> bool:
    return bool(getattr(shown, "_is_protocol", False))


def _end(node: ast.expr) -> str:
    """The last name of a dotted expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _names_one_of(node: ast.AST, types: set[str]) -> bool:
    return any(_end(inner) in types for inner in ast.walk(node) if isinstance(inner, ast.expr))


def _is_call_of(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _questions(tree: ast.AST, types: set[str]) -> Iterator[int]:
    """The line of every question of a part's type: isinstance, type() is, class patterns, getattr and hasattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_call_of(node, "isinstance", "issubclass"):
            asked = _names_one_of(node.args[1], types)
        elif isinstance(node, ast.Call) and _is_call_of(node, "getattr", "hasattr"):
            asked = _end(node.args[0]) in ENDS
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asked = any(_is_call_of(side, "type") for side in sides) and any(_names_one_of(s, types) for s in sides)
        else:
            asked = isinstance(node, ast.MatchClass) and _end(node.cls) in types
        if asked:
            yield node.lineno  # type: ignore[attr-defined]


def test_a_question_of_a_part_is_seen_however_it_is_asked() -> None:
    asked = """
isinstance(scheme.select, TopK)
isinstance(x, (int, quantize.BF16))
isinstance(x, Period | int)
type(x) is TopK
type(scheme.select) in (TopK, RandK)
getattr(scheme.memory, "decay", 1)
hasattr(select, "rho")
match x:
    case Server(): pass
    case int(): pass
"""
    other = """
isinstance(x, int)
type(x) is int
getattr(module, "memory")
TopK(rho=0.1)
"""
    assert sorted(_questions(ast.parse(asked), _types_of_parts())) == [2, 3, 4, 5, 6, 7, 8, 10]
    assert not list(_questions(ast.parse(other), _types_of_parts()))


def test_parts_are_seldom_asked_for_their_type_outside_their_rooms() -> None:
    types = _types_of_parts()
    rooms = {room.__name__.split(".")[-1] for room in PARTS}
    asked = [
        f"{_in_file(path)}:{line}"
        for path in _files()
        if path.relative_to(SOURCE).parts[0] not in rooms
        for line in sorted(_questions(ast.parse(path.read_text()), types))
    ]
    assert len(asked) <= MOST_QUESTIONS, f"{len(asked)} questions of a part's type:\n" + "\n".join(asked)


def test_no_path_and_no_transport_is_half_a_class() -> None:
    found = []
    for room in WHOLE:
        for path in sorted((SOURCE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                is_cast = isinstance(node, ast.Call) and (_is_call_of(node, "cast") or _is_typing_cast(node.func))
                if isinstance(node, ast.expr) and (is_cast or _end(node) == "NotImplementedError"):
                    found.append(f"{_in_file(path)}:{node.lineno}")
    assert not found, "NotImplementedError or cast in " + ", ".join(found)


def _is_typing_cast(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "cast" and _end(node.value) == "typing"


def _private_names(tree: ast.AST) -> Iterator[str]:
    """The names with an underscore that are asked of something else than self, imported, or set by name."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and _end(node.value) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.Call) and _end(node.func) == "setattr":
            names = [arg.value.rpartition(".")[2] for arg in node.args if isinstance(getattr(arg, "value", 0), str)]  # type: ignore[attr-defined]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_tests_reach_into_few_private_names() -> None:
    root = SOURCE.parents[1]
    ours = {
        node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else node.name
        for path in [*_files(), *(root / "lab/src").rglob("*.py"), *(root / "tools").glob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name | ast.Attribute | ast.FunctionDef | ast.ClassDef)
    }
    reached = [
        f"{path.relative_to(root)}: {name}"
        for folder in ("tests", "lab/tests")
        for path in sorted((root / folder).rglob("*.py"))
        for name in _private_names(ast.parse(path.read_text()))
        if name in ours - OF_OTHERS
    ]
    assert len(reached) <= MOST_PRIVATE_NAMES, "\n".join(reached)


@pytest.mark.parametrize(
    ("scheme", "most"), [("topk", 20), ("overlap", 25), ("streaming", 22), ("gossip:rate=0.3,mode=matched", 20)]
)
def test_a_bucket_passes_few_files(scheme: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.backend() != "cpu":
        pytest.skip("counted with native kernels")
    monkeypatch.setattr(torch_optimizer, "_global_optimizer_post_hooks", OrderedDict())  # of other tests' sessions
    files = {code.co_filename for code in functions_passed(scheme)}
    assert len(files) <= most, sorted(files)
