"""Each kernel by name, in the backend that fits its first tensor."""

# mypy: implicit-reexport
# ruff: noqa: F403 - a kernel is declared where it is defined, and nowhere again

import functools
import importlib.util
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from laconic.errors import KernelError
from laconic.kernels import reference  # noqa: F401 - where kernels are declared
from laconic.kernels.contract import DEFINITIONS, K
from laconic.kernels.cpu.library import HOW_TO_GET_THEM, level

if TYPE_CHECKING:  # the signatures; what runs is chosen at the end of this file
    from laconic.kernels.reference import *

BACKENDS = ("reference", "cpu", "gpu")
_HOW_TO_GET = {"cpu": HOW_TO_GET_THEM, "gpu": "triton is not installed; pip install triton"}


def backend(device: torch.device | str = "cpu") -> str:
    """The name of the backend that runs on tensors of this device."""
    return _backend(_requested(), torch.device(device).type)


def _requested() -> str:
    """The backend that the environment names, or nothing."""
    return os.environ.get("LACONIC_KERNELS", "")


@functools.cache
def _backend(requested: str, device: str) -> str:
    built = {"cpu": level() is not None, "gpu": importlib.util.find_spec("triton") is not None}
    if requested and requested not in BACKENDS:
        raise KernelError(f"LACONIC_KERNELS is {requested!r}; write one of {', '.join(BACKENDS)}")
    if not built.get(requested, True):
        raise KernelError(f"LACONIC_KERNELS is {requested!r}, but {_HOW_TO_GET[requested]}")
    own = {"cpu": "cpu", "cuda": "gpu"}.get(device)
    if requested in built and requested != own:
        raise KernelError(f"LACONIC_KERNELS is {requested!r}, but the tensors are on {device}; leave it unset")
    return requested or (own if own is not None and built[own] else "reference")


def missing(device: torch.device | str) -> str | None:
    """A remark where the reference kernels run on this device though nobody named them, or None.

    Raises where a backend was named that is missing: better here than in the first backward pass.
    """
    if backend(device) != "reference" or _requested():
        return None
    why = _HOW_TO_GET["cpu" if torch.device(device).type == "cpu" else "gpu"]
    return f"laconic runs on its reference kernels, which are slower: {why}"


def native_on_host() -> bool:
    """Return whether native code runs on tensors of the host, and nobody named other kernels."""
    return not _requested() and backend("cpu") == "cpu"


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
        return getattr(module(_backend(_requested(), device.type)), name)(first, *rest, **named)

    return call  # type: ignore[return-value]


globals().update({name: _dispatched(definition) for name, definition in DEFINITIONS.items()})
