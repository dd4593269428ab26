"""The sum of several sparse frames."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.cpu.library import library
from laconic.kernels.cpu.pointer import check_reach, num_threads, pointer


def add_at_(total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    counts = [at.numel() for at in positions]
    at = [pointer("positions", one, torch.int32) for one in positions]
    what = [pointer("values", one, torch.float32, count) for one, count in zip(values, counts, strict=True)]
    frames = len(counts)
    outside = library().laconic_add_at(
        pointer("total", total, torch.float32),
        total.numel(),
        (ctypes.c_void_p * frames)(*at),
        (ctypes.c_void_p * frames)(*what),
        (ctypes.c_int64 * frames)(*counts),
        frames,
        num_threads(),
    )
    if outside:
        for one in positions:
            check_reach(one, total.numel())
