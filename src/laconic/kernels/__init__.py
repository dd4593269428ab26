"""Numerical kernels: one name and signature each, whatever the machine.

`reference` is plain torch, runs on CPU and CUDA tensors, and is the definition; `cpu` is native code, `gpu` is Triton,
and both give the reference's results, bit for bit. LACONIC_KERNELS names the backend; one that is asked for by name is
used or is an error. Where none is named, a tensor's device decides, and `backend` says what came of it.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch

from laconic.errors import KernelError
from laconic.kernels import reference
from laconic.kernels.cpu.library import HOW_TO_GET_THEM, level
from laconic.kernels.search import CALLS, PASSES, new_search

__all__ = [
    "BACKENDS",
    "CALLS",
    "PASSES",
    "add_at_",
    "all_finite",
    "average_words",
    "backend",
    "check_sum",
    "compact",
    "compare_residues",
    "count_at_least",
    "decode_differences",
    "decode_elias_fano",
    "decode_rice",
    "encode_elias_fano",
    "encode_residues",
    "encode_rice",
    "largest_changes",
    "largest_magnitudes",
    "mean_magnitude",
    "missing",
    "module",
    "native_on_host",
    "new_search",
    "pack_lanes",
    "pack_signs",
    "quantize_pack",
    "reference",
    "set_bits",
    "unpack_bits",
    "unpack_lanes",
    "unpack_scale",
    "unpack_signs",
    "vote",
    "withdraw_",
]

BACKENDS = ("reference", "cpu", "gpu")
_HOW_TO_GET = {"cpu": HOW_TO_GET_THEM, "gpu": "triton is not installed; pip install triton"}

K = TypeVar("K", bound=Callable[..., Any])


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


add_at_ = _dispatched(reference.add_at_)
all_finite = _dispatched(reference.all_finite)
average_words = _dispatched(reference.average_words)
check_sum = _dispatched(reference.check_sum)
compact = _dispatched(reference.compact)
compare_residues = _dispatched(reference.compare_residues)
count_at_least = _dispatched(reference.count_at_least)
decode_differences = _dispatched(reference.decode_differences)
decode_elias_fano = _dispatched(reference.decode_elias_fano)
decode_rice = _dispatched(reference.decode_rice)
encode_elias_fano = _dispatched(reference.encode_elias_fano)
encode_residues = _dispatched(reference.encode_residues)
encode_rice = _dispatched(reference.encode_rice)
largest_changes = _dispatched(reference.largest_changes)
largest_magnitudes = _dispatched(reference.largest_magnitudes)
mean_magnitude = _dispatched(reference.mean_magnitude)
pack_lanes = _dispatched(reference.pack_lanes)
pack_signs = _dispatched(reference.pack_signs)
quantize_pack = _dispatched(reference.quantize_pack)
set_bits = _dispatched(reference.set_bits)
unpack_bits = _dispatched(reference.unpack_bits)
unpack_lanes = _dispatched(reference.unpack_lanes)
unpack_scale = _dispatched(reference.unpack_scale)
unpack_signs = _dispatched(reference.unpack_signs)
vote = _dispatched(reference.vote)
withdraw_ = _dispatched(reference.withdraw_)
