"""Vectors end to end, and the sum of several sparse frames."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.cpu.library import check_reach, library, num_threads, pointer


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
