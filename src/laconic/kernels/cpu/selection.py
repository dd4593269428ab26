"""Which entries are largest, and taking them out: one pass over memory in the usual case."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels import reference
from laconic.kernels.cpu.library import Facts, check_apart, library, num_threads, pointer
from laconic.kernels.reference.selection import note_

# A guess from the last step is too low while a balance grows, and then 2.6 k candidates, zeroed and put back, double
# the time of 25 M entries at 1 %; a sample of each step costs 1 % of it and catches 1.2 k.
_FROM_A_SAMPLE = -1.0


def all_finite(x: Tensor, below: float = math.inf) -> bool:
    if x.dtype != torch.float32:
        return reference.all_finite(x, below)
    if below < math.inf:  # a pass over memory takes the same time
        return not count_at_least(x, torch.tensor([below], dtype=torch.float32)).item()
    return bool(library().laconic_all_finite(pointer("x", x, torch.float32), x.numel(), num_threads()))


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


def compact(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    positions = torch.empty(x.numel(), dtype=torch.int32)
    values = torch.empty(x.numel(), dtype=torch.float32)
    count = library().laconic_compact(
        pointer("x", x, torch.float32), x.numel(), threshold, positions.data_ptr(), values.data_ptr()
    )
    return positions[:count].clone(), values[:count].clone()


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
        _FROM_A_SAMPLE,
        num_threads(),
        positions.data_ptr(),
        values.data_ptr(),
        ctypes.byref(facts),
    )
    note_(search, kth=facts.kth, mean=facts.mean, passes=facts.passes)
    return positions, values
