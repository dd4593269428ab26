"""The house itself: imports go down and in no circle, fences hold, names are public once, import stays lean."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import laconic
from check_names import banned_names

SOURCE = Path(laconic.__file__).parent
FLOORS = (
    ("errors", "fault_points"),
    ("layout",),
    ("kernels",),
    ("wire", "transport", "optim"),
    ("testing",),
    ("select", "quantize", "memory", "trigger", "outer"),
    ("exchange",),
    ("scheme",),
    ("recipes",),
    ("server",),
    ("paths",),
    ("session",),
    ("replicas",),
    ("members", "adapters"),
    ("planning",),
    ("api",),
    ("integrations",),
    ("doctor",),
    ("cli",),
)
FENCES = {
    "torch.distributed": {"transport", "adapters", "integrations", "planning", "doctor", "cli"},
    "triton": {"kernels"},
    "socket": {"transport"},
    "ssl": {"transport"},
    "selectors": {"transport"},
    "cryptography": {"members"},
    "pyroute2": set[str](),
    "laconic_lab": set[str](),
}
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def _files() -> list[Path]:
    return [p for p in sorted(SOURCE.rglob("*.py")) if _room(p) not in ("__init__", "__main__")]


def test_every_room_has_a_floor() -> None:
    assert {_room(p) for p in _files()} == set(FLOOR_OF)


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    room = _room(path)
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "laconic" and len(parts) > 1 and parts[1] in FLOOR_OF and parts[1] != room:
            assert FLOOR_OF[parts[1]] < FLOOR_OF[room], f"{path} imports {name}, which is not below it"


def test_no_file_is_in_a_circle_of_imports() -> None:
    names = {".".join(("laconic", *p.relative_to(SOURCE).with_suffix("").parts)): p for p in SOURCE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in names.items() if name != "laconic.__init__"}
    waiting = {name: {_module_of(asked, modules) for asked in _imports(p)} - {name, ""} for name, p in modules.items()}
    while free := {name for name, below in waiting.items() if not below & waiting.keys()}:
        waiting = {name: below for name, below in waiting.items() if name not in free}
    assert not waiting, f"in a circle, or above one: {sorted(waiting)}"


def _module_of(name: str, modules: Mapping[str, Path]) -> str:
    """The module that an imported name is, or stands in; nothing for those of others."""
    return name if name in modules else name.rpartition(".")[0] if name.rpartition(".")[0] in modules else ""


@pytest.mark.parametrize("fenced", FENCES)
def test_fences_hold(fenced: str) -> None:
    for path in _files():
        if any(name == fenced or name.startswith(f"{fenced}.") for name in _imports(path)):
            assert _room(path) in FENCES[fenced], f"{path} imports {fenced}"


def test_kernels_are_reached_through_the_dispatcher() -> None:
    inner = {path.stem for path in (SOURCE / "kernels").iterdir()} - {"__init__"}
    for path in _files():
        names = {name for name in _imports(path) if name.startswith("laconic.kernels.")}
        reached = {name for name in names if name.split(".")[2] in inner}
        assert _room(path) == "kernels" or not reached, f"{path} imports {reached}; import names of laconic.kernels"


def test_the_library_logs_and_prints_nothing_but_in_its_commands() -> None:
    for path in _files():
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        printing = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
        assert _room(path) == "cli" or not printing, f"{path} prints; log to a child of the logger laconic"


def test_names_say_what_they_hold() -> None:
    assert not [name for path in sorted(SOURCE.rglob("*.py")) for name in banned_names(path)]


def test_public_names_are_sorted_and_exist() -> None:
    assert laconic.__all__ == sorted(laconic.__all__)
    assert all(hasattr(laconic, name) for name in laconic.__all__)
    public = {name for name in vars(laconic) if not name.startswith("_")}
    modules = {p.name.removesuffix(".py") for p in SOURCE.iterdir()}
    assert public - modules <= set(laconic.__all__)


def test_every_error_is_public_and_in_the_tree() -> None:
    from laconic import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(laconic.__all__)
    assert all(name in (errors.__doc__ or "") for name in classes)


IMPORT = """
import sys, threading
import torch, torch.distributed, torch.nn.parallel, numpy
before = set(sys.modules)
import laconic
added = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(threading.active_count(), torch.distributed.is_initialized(), *sorted(added))
"""


def test_import_is_lean_and_starts_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "1 False laconic torch"  # torch: its modules with the DDP hooks


def test_the_version_is_said_once() -> None:
    pyproject = (SOURCE.parents[1] / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.*)"', pyproject, re.M)
    assert found is not None and found[1] == laconic.__version__
