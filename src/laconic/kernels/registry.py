"""Which kernels there are, each declared where it is defined, and what they ask of the tensors they are given."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

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
    importlib.import_module("laconic.kernels.reference")  # by which all are declared
    kernels = {name: DEFINITIONS[name] for name in taken_from_reference}
    # By file name: pkgutil would take the native libraries for modules too.
    files = {file.stem for folder in sys.modules[backend].__path__ for file in Path(folder).glob("*.py")}
    for stem in sorted(files - {"__init__"}):
        module = importlib.import_module(f"{backend}.{stem}")
        named_alike = [getattr(module, name) for name in DEFINITIONS if hasattr(module, name)]
        kernels |= {own.__name__: own for own in named_alike if own.__module__ == module.__name__}
    missing = DEFINITIONS.keys() - kernels.keys()
    if missing:
        raise KernelError(
            f"{backend} has no {', '.join(sorted(missing))}; write it there, or name it among the reference's"
        )
    return kernels


def check_vector(x: Tensor, dtype: torch.dtype, length: int, name: str, *, dims: int = 1) -> None:
    """Raise unless `x` is a contiguous vector (or matrix, with dims=2) of that dtype, with that many entries."""
    if x.dtype != dtype or x.numel() != length or x.dim() != dims or not x.is_contiguous():
        given = f"{'' if x.is_contiguous() else 'strided '}{x.dtype}{list(x.shape)}"
        raise KernelError(f"{name} is {given}; give a contiguous {dtype}[{length}]")


def check_rows(x: Tensor, dtype: torch.dtype, least: int, name: str) -> None:
    """Raise unless `x` is a matrix of that dtype whose rows are contiguous and have at least that many entries."""
    if x.dtype != dtype or x.dim() != 2 or x.stride(1) != 1 or x.shape[1] < least:
        raise KernelError(f"{name} is {x.dtype}{list(x.shape)}; give rows of {dtype}, each of {least} entries or more")


def check_places(bases: Tensor, factors: Tensor, places: Tensor, rank: int) -> None:
    """Raise unless each row of `places`, (start of a basis, start of its factor, rows), lies within both."""
    check_vector(places, torch.int64, 3 * len(places), "places", dims=2)
    starts, firsts, rows = places.unbind(1)
    ends = [(starts + rank * rows).max(), (firsts + rank * rows).max()] if len(places) else []
    if (
        rank < 1
        or any(end > len(whole) for end, whole in zip(ends, (bases, factors), strict=False))
        or (places < 0).any()
    ):
        raise KernelError(f"places reach beyond {len(bases)} entries of bases or {len(factors)} of factors")
