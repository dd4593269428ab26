"""All backends share this: declared kernels, checks of their arguments, the memory of a search, keys of draws."""

from __future__ import annotations

import importlib
import math
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


def words_of(num_bits: int) -> int:
    """The number of 32-bit words that hold so many bits."""
    return -(-num_bits // 32)


# What a search remembers: places in a float64 tensor on the device of the data, so that no kernel waits for the host.
GUESS, KTH, MEAN, MARGIN, PASSES, CALLS = range(6)

LOG_AIM = math.log(1.4)  # candidates to aim at, in units of k; fewer than k would cost passes
SHYEST, BOLDEST = 0.3, 0.0005  # the margin's bounds
PACE = 2.0  # a margin at most doubles or halves in a step
SMALLEST_CHANGE = 0.5


def new_search(n: int, k: int, device: torch.device | str = "cpu") -> Tensor:
    """The memory of a search for the k largest of n, before its first step.

    Under a Laplace law P(|x| > t) = exp(-t/b) the k-th largest stands at t = b*ln(n/k), and a threshold that is
    lower by the share ln(c)/ln(n/k) catches c*k entries: the first margin.
    """
    margin = LOG_AIM / max(math.log(n / k), 1e-9)
    return torch.tensor([0, 0, 0, min(max(margin, BOLDEST), SHYEST), 0, 0], dtype=torch.float64, device=device)


def note_(search: Tensor, *, kth: float, mean: float, passes: int) -> None:
    """Keep the records of a step; the guess of the next is the GPU's alone (gpu/sparse.py)."""
    records = search.cpu().numpy()
    records[KTH] = kth
    records[MEAN] = mean
    records[PASSES] += passes
    records[CALLS] += 1
    if search.device.type != "cpu":
        search.copy_(torch.from_numpy(records))


_MASK_64 = (1 << 64) - 1

Key = tuple[int, int]  # two signed 32-bit numbers: a stream of its own


def hash_64(*numbers: int) -> int:
    """SplitMix64 over a sequence of whole numbers (Steele, Lea, Flood, OOPSLA 2014), as an unsigned 64-bit number."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK_64
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state


def key_of(*numbers: int) -> Key:
    """The stream of draws that belongs to these numbers: (seed, rank, step, bucket) and the like."""
    state = hash_64(*numbers)
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits
