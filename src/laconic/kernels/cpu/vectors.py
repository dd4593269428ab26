"""Vectors end to end, and sums of two."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.cpu.library import library
from laconic.kernels.cpu.pointer import num_threads, pointer


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
