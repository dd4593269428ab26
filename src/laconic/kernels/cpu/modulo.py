"""Modulo codes of values that another worker holds nearly alike."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.cpu.library import library, num_threads, pointer
from laconic.kernels.reference.modulo import MODULO_BLOCK


def largest_changes(x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    n = x.numel()
    changes, sizes = torch.empty(2, -(-n // MODULO_BLOCK), dtype=torch.float32)
    at = pointer("x", x, torch.float32)
    last_at = pointer("last", last, torch.float32, n)
    library().laconic_largest_changes(at, last_at, n, num_threads(), changes.data_ptr(), sizes.data_ptr())
    return changes, sizes


def encode_modulo(x: Tensor, steps: Tensor, offset: float, bits: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    num_blocks = -(-x.numel() // MODULO_BLOCK)
    codes = torch.empty(-(-n // 8) * bits, dtype=torch.uint8)
    sums = torch.empty(num_blocks, dtype=torch.int32)
    at = pointer("x", x, torch.float32)
    steps_at = pointer("steps", steps, torch.float32, num_blocks)
    library().laconic_encode_modulo(at, n, steps_at, offset, bits, num_threads(), codes.data_ptr(), sums.data_ptr())
    return codes, sums


def compare_modulo(
    x: Tensor, codes: Tensor, sums: Tensor, steps: Tensor, offset: float, bits: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    n = x.numel()
    num_blocks = -(-x.numel() // MODULO_BLOCK)
    moves = torch.empty_like(x) if out is None else out
    peaks = torch.empty(num_blocks, dtype=torch.int8)
    differences = torch.empty(-(-n // 8) * (bits - 1), dtype=torch.uint8)
    library().laconic_compare_modulo(
        pointer("x", x, torch.float32),
        n,
        pointer("codes", codes, torch.uint8, -(-n // 8) * bits),
        pointer("sums", sums, torch.int32, num_blocks),
        pointer("steps", steps, torch.float32, num_blocks),
        offset,
        bits,
        num_threads(),
        pointer("out", moves, torch.float32, n),
        differences.data_ptr(),
        peaks.data_ptr(),
    )
    return moves, differences, peaks


def decode_differences(codes: Tensor, steps: Tensor, n: int, bits: int, *, out: Tensor | None = None) -> Tensor:
    moves = torch.empty(n, dtype=torch.float32) if out is None else out
    codes_at = pointer("codes", codes, torch.uint8, -(-n // 8) * bits)
    steps_at = pointer("steps", steps, torch.float32, -(-n // MODULO_BLOCK))
    moves_at = pointer("out", moves, torch.float32, n)
    library().laconic_decode_differences(codes_at, n, steps_at, bits, num_threads(), moves_at)
    return moves
