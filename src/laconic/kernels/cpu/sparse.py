"""Sparse vectors: the largest entries taken out, in one pass over memory in the usual case; frames added up."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels import reference
from laconic.kernels.contract import GUESS, Key, note_
from laconic.kernels.cpu.library import Facts, check_apart, check_reach, library, num_threads, pointer

# A guess from the last step is too low while a balance grows, and then 2.6 k candidates, zeroed and put back, double
# the time of 25 M entries at 1 %; a sample of each step costs 1 % of it and catches 1.2 k.
FIRST_THRESHOLD = -1.0  # which a negative one asks for


def all_finite(x: Tensor, below: float = math.inf) -> bool:
    if x.dtype != torch.float32:
        return reference.all_finite(x, below)
    if below < math.inf:  # a pass over memory takes the same time
        return not count_at_least(x, torch.tensor([below], dtype=torch.float32)).item()
    return bool(library().laconic_all_finite(pointer("x", x, torch.float32), x.numel(), num_threads()))


def draw_distinct_(out: Tensor, n: int, start: int, key: Key) -> None:
    at = pointer("out", out, torch.int64)
    if not 0 <= out.numel() <= n < 1 << 31:
        raise KernelError(f"{out.numel()} of {n} cannot be drawn; give k <= n < 2^31")
    if out.numel():
        library().laconic_draw_distinct(n, start % n, out.numel(), *(part & 0xFFFFFFFF for part in key), at)


def mean_magnitude(x: Tensor) -> Tensor:
    total = library().laconic_sum_magnitudes(pointer("x", x, torch.float32), x.numel(), num_threads())
    return torch.tensor(total / x.numel(), dtype=torch.float64)


def count_at_least(x: Tensor, thresholds: Tensor) -> Tensor:
    counts = torch.empty(thresholds.numel(), dtype=torch.int64)
    library().laconic_count_at_least(
        pointer("x", x, torch.float32),
        x.numel(),
        pointer("thresholds", thresholds, torch.float32),
        thresholds.numel(),
        num_threads(),
        counts.data_ptr(),
    )
    return counts


def withdraw_(
    balance: Tensor, addend: Tensor | None, k: int, search: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    n = balance.numel()
    if not 1 <= k <= n < 2**31:
        raise KernelError(f"withdraw_ was asked for {k} of {n} entries; give 1 <= k <= n < 2^31")
    if addend is not None:
        check_apart("balance", balance, "addend", addend)
    positions = torch.empty(k, dtype=torch.int32)
    values = torch.empty(k, dtype=torch.float32)
    facts = Facts()
    library().laconic_withdraw(
        pointer("balance", balance, torch.float32),
        None if addend is None else pointer("addend", addend, torch.float32, n),
        factor,
        n,
        k,
        float(search[GUESS]) or FIRST_THRESHOLD,
        num_threads(),
        positions.data_ptr(),
        values.data_ptr(),
        ctypes.byref(facts),
    )
    note_(search, kth=facts.kth, mean=facts.mean, passes=facts.passes)
    return positions, values


def join_(out: Tensor, pieces: Sequence[Tensor], addend: Tensor | None = None) -> None:
    counts = [piece.numel() for piece in pieces]
    n = sum(counts)
    at = [pointer("a piece", piece, torch.float32) for piece in pieces]
    library().laconic_join(
        (ctypes.c_void_p * len(at))(*at),
        (ctypes.c_int64 * len(at))(*counts),
        len(at),
        None if addend is None else pointer("addend", addend, torch.float32, n),
        pointer("out", out, torch.float32, n),
        n,
        num_threads(),
    )


def add_at_(total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    outside = library().laconic_add_at(*addresses(total, positions, values), num_threads())
    if outside:
        for one in positions:
            check_reach(one, total.numel())


def sum_over_union_(
    total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor], *, take: bool
) -> tuple[Tensor, Tensor]:
    most = sum(at.numel() for at in positions)
    places = torch.empty(most, dtype=torch.int32)
    sums = torch.empty(most, dtype=torch.float32)
    frames = addresses(total, positions, values)
    length = library().laconic_sum_over_union(*frames, take, num_threads(), places.data_ptr(), sums.data_ptr())
    if length < 0:
        for one in positions:
            check_reach(one, total.numel())
        raise KernelError("positions are not ascending; give each frame's in order")
    return places[:length], sums[:length]


def addresses(
    total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor], *, more: int = 0
) -> tuple[Any, ...]:
    """A total and the frames to be added to it as the library takes them; of values there are so many more."""
    counts = [at.numel() for at in positions]
    at = [pointer("positions", one, torch.int32) for one in positions]
    what = [pointer("values", one, torch.float32, count + more) for one, count in zip(values, counts, strict=True)]
    frames = len(counts)
    return (
        pointer("total", total, torch.float32),
        total.numel(),
        (ctypes.c_void_p * frames)(*at),
        (ctypes.c_void_p * frames)(*what),
        (ctypes.c_int64 * frames)(*counts),
        frames,
    )
