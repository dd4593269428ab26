"""Which kernels there are: each is declared where it is defined, and a backend's own are found by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from laconic.errors import KernelError

K = TypeVar("K", bound=Callable[..., Any])

DEFINITIONS: dict[str, Callable[..., Any]] = {}  # by name, in the order in which the reference's files were read


def kernel(definition: K) -> K:
    """Declare a kernel: its name and signature are those of its definition in the reference."""
    DEFINITIONS[definition.__name__] = definition
    return definition


def kernels_in(backend: str, taken_from_reference: Iterable[str] = ()) -> dict[str, Callable[..., Any]]:
    """The kernels of a backend, by name: functions of its package's files that are named like a definition.

    Those that it has no code of its own for are the reference's, where the backend says so, and an error otherwise.
    """
    found = {name: DEFINITIONS[name] for name in taken_from_reference}
    # By file name: pkgutil would take the native libraries for modules too.
    files = {file.stem for folder in sys.modules[backend].__path__ for file in Path(folder).glob("*.py")}
    for stem in sorted(files - {"__init__"}):
        module = importlib.import_module(f"{backend}.{stem}")
        named_alike = [getattr(module, name) for name in DEFINITIONS if hasattr(module, name)]
        found |= {own.__name__: own for own in named_alike if own.__module__ == module.__name__}
    missing = DEFINITIONS.keys() - found.keys()
    if missing:
        raise KernelError(
            f"{backend} has no {', '.join(sorted(missing))}; write it there, or name it among the reference's"
        )
    return found
