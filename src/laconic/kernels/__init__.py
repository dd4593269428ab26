"""Numerical kernels: one name and signature each, whatever the machine.

`reference` is plain torch, runs on CPU and CUDA tensors, and is the definition; `cpu` is native code, `gpu` is Triton,
and both give the reference's results, bit for bit. LACONIC_KERNELS names the backend; one that is asked for by name is
used or is an error. Where none is named, a tensor's device decides, and `backend` says what came of it.
"""

# mypy: implicit-reexport
# ruff: noqa: F403 - a kernel is declared where it is defined, and nowhere again

import functools
import importlib.util
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from laconic.errors import KernelError
from laconic.kernels import reference
from laconic.kernels.cpu.library import HOW_TO_GET_THEM, level
from laconic.kernels.registry import DEFINITIONS, K
from laconic.kernels.search import CALLS, PASSES, new_search

if TYPE_CHECKING:  # the signatures; what runs is chosen at the end of this file
    from laconic.kernels.reference import *

BACKENDS = ("reference", "cpu", "gpu")
_HOW_TO_GET = {"cpu": HOW_TO_GET_THEM, "gpu": "triton is not installed; pip install triton"}


def backend(device: torch.device | str = "cpu") -> str:
    """The name of the backend that runs on tensors of this device."""
    return _backend(_asked(), torch.device(device).type)


def _asked() -> str:
    """The backend that somebody asked for, or nothing."""
    return os.environ.get("LACONIC_KERNELS", "")


@functools.cache
def _backend(asked: str, device: str) -> str:
    there = {"cpu": level() is not None, "gpu": importlib.util.find_spec("triton") is not None}
    if asked and asked not in BACKENDS:
        raise KernelError(f"LACONIC_KERNELS is {asked!r}; write one of {', '.join(BACKENDS)}")
    if not there.get(asked, True):
        raise KernelError(f"LACONIC_KERNELS is {asked!r}, but {_HOW_TO_GET[asked]}")
    own = {"cpu": "cpu", "cuda": "gpu"}.get(device)
    if asked in there and asked != own:
        raise KernelError(f"LACONIC_KERNELS is {asked!r}, but the tensors are on {device}; leave it unset")
    return asked or (own if own is not None and there[own] else "reference")


def missing(device: torch.device | str) -> str | None:
    """What to say where the reference kernels run on this device though nobody asked for them.

    Raises where a backend was asked for that is not there: better here than in the first backward pass.
    """
    if backend(device) != "reference" or _asked():
        return None
    why = _HOW_TO_GET["cpu" if torch.device(device).type == "cpu" else "gpu"]
    return f"laconic runs on its reference kernels, which are slower: {why}"


def native_on_host() -> bool:
    """Whether native code runs on tensors of the host, and nobody asked for other kernels by name."""
    return not _asked() and backend("cpu") == "cpu"


@functools.cache
def module(name: str) -> ModuleType:
    """A backend, by name."""
    return importlib.import_module(f"laconic.kernels.{name}")


def _dispatched(definition: K) -> K:
    """The kernel of this name in the backend that fits its first tensor."""
    name = definition.__name__

    @functools.wraps(definition)
    def call(first: Any, *rest: Any, **named: Any) -> Any:
        device = (first[0] if isinstance(first, (list, tuple)) else first).device
        return getattr(module(_backend(_asked(), device.type)), name)(first, *rest, **named)

    return call  # type: ignore[return-value]


globals().update({name: _dispatched(definition) for name, definition in DEFINITIONS.items()})
