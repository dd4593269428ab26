"""Which entries are large: parts of the search, each a pass of its own."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import reference
from laconic.kernels.checks import check_vector
from laconic.kernels.gpu.launch import launch
from laconic.kernels.gpu.magnitude import magnitude_bits
from laconic.kernels.gpu.withdraw_adding import TILE


@triton.jit
def _find_strange(x, found, n, least):
    """Set `found` if the bits of some |x| reach `least`; programs that set it agree, so they need not take turns."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    largest = tl.max(magnitude_bits(tl.load(x + at, mask=at < n, other=0.0)), 0)
    tl.store(found, 1, mask=largest >= least)


@triton.jit
def _zero_if(x, found, n):
    if tl.load(found) != 0:
        at = tl.program_id(0) * TILE + tl.arange(0, TILE)
        tl.store(x + at, tl.zeros([TILE], tl.float32), mask=at < n)


@triton.jit
def _sum_magnitudes(x, sums, n):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    magnitude = tl.abs(tl.load(x + at, mask=at < n, other=0.0))
    tl.store(sums + tl.program_id(0), tl.sum(magnitude.to(tl.float64), 0))


@triton.jit(do_not_specialize=["num_thresholds"])
def _count_at_least(x, thresholds, counts, n, num_thresholds):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    bits = tl.where(at < n, magnitude_bits(tl.load(x + at, mask=at < n, other=0.0)), -1)
    for i in range(num_thresholds):
        reached = tl.sum((bits >= magnitude_bits(tl.load(thresholds + i))).to(tl.int32), 0)
        tl.atomic_add(counts + i, reached.to(tl.int64), sem="relaxed")


@triton.jit
def _count_hits(x, counts, n, threshold):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    least = magnitude_bits(tl.full([TILE], threshold, tl.float32))
    hit = (magnitude_bits(tl.load(x + at, mask=at < n, other=0.0)) >= least) & (at < n)
    tl.store(counts + tl.program_id(0), tl.sum(hit.to(tl.int32), 0))


@triton.jit
def _list_hits(x, ends, positions, values, n, threshold):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x + at, mask=at < n, other=0.0)
    hit = (magnitude_bits(value) >= magnitude_bits(tl.full([TILE], threshold, tl.float32))) & (at < n)
    one = hit.to(tl.int32)
    slot = tl.load(ends + tl.program_id(0)).to(tl.int32) - tl.sum(one, 0) + tl.cumsum(one, 0) - 1
    tl.store(positions + slot, at, mask=hit)
    tl.store(values + slot, value, mask=hit)


@cache
def _bits(magnitude: float) -> int:
    """Of a float32; they order like numbers."""
    return int(torch.tensor(magnitude, dtype=torch.float32).view(torch.int32))


def all_finite(x: Tensor, below: float = math.inf) -> bool:
    """Whether all |x| are below a bound, and none is NaN; waits for the device. Only float32 is looked at here."""
    n = x.numel()
    if x.dtype != torch.float32 or n == 0:
        return reference.all_finite(x, below)
    found = torch.zeros(1, dtype=torch.int32, device=x.device)
    mark_strange_(found, x, below)
    return not found.item()


def mark_strange_(found: Tensor, x: Tensor, below: float = math.inf) -> None:
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    check_vector(found, torch.int32, 1, "found")
    launch(_find_strange, (*_tiles(n), 1), x, found, n, _bits(below))


def zero_if_(x: Tensor, found: Tensor) -> None:
    """Where nothing is to be done, no entry is touched."""
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    check_vector(found, torch.int32, 1, "found")
    launch(_zero_if, (*_tiles(n), 1), x, found, n)


def mean_magnitude(x: Tensor) -> Tensor:
    """The mean of |x|, a 0-d float64; a float32 sum over 25 M entries would be off by 5 %."""
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    sums = torch.empty(_tiles(n)[0], dtype=torch.float64, device=x.device)
    if n:
        _sum_magnitudes[_tiles(n)](x, sums, n)
    return sums.sum() / n


def count_at_least(x: Tensor, thresholds: Tensor) -> Tensor:
    """How many |x| reach each of the float32 `thresholds`, int64."""
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    check_vector(thresholds, torch.float32, thresholds.numel(), "thresholds")
    counts = torch.zeros(thresholds.numel(), dtype=torch.int64, device=x.device)
    if n:
        _count_at_least[_tiles(n)](x, thresholds, counts, n, thresholds.numel())
    return counts


def compact(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Ascending int32 positions and values of the |x| that reach `threshold`; waits for the device for their number."""
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    if n == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device), x.new_empty(0)
    counts = torch.empty(_tiles(n)[0], dtype=torch.int32, device=x.device)
    _count_hits[_tiles(n)](x, counts, n, float(threshold))
    ends = counts.cumsum(0)
    values = x.new_empty(int(ends[-1]))
    positions = torch.empty(values.numel(), dtype=torch.int32, device=x.device)
    _list_hits[_tiles(n)](x, ends, positions, values, n, float(threshold))
    return positions, values


def _tiles(n: int) -> tuple[int]:
    return (-(-n // int(TILE.value)),)
