"""Integers on a shared grid: rounding and packing in one pass, unpacking and scaling in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import Key
from laconic.kernels.cpu.library import library, num_threads, pointer


def largest_magnitudes(x: Tensor, group: int) -> Tensor:
    largest = torch.empty(-(-x.numel() // group), dtype=torch.float32)
    at = pointer("x", x, torch.float32)
    library().laconic_largest_magnitudes(at, x.numel(), group, num_threads(), largest.data_ptr())
    return largest


def quantize_pack(
    x: Tensor, inverse: Tensor, group: int, levels: int, lane_bits: int, num_words: int, dtype: torch.dtype, key: Key
) -> Tensor:
    n = x.numel()
    words = torch.empty(num_words, dtype=dtype)
    if not 0 <= n <= num_words * (8 * words.itemsize // lane_bits):
        raise KernelError(f"{n} codes of {lane_bits} bits do not fit {num_words} words of {dtype}; give more words")
    library().laconic_quantize_pack(
        pointer("x", x, torch.float32),
        n,
        _scales("inverse", inverse, group, n),
        inverse.numel(),
        group,
        levels,
        lane_bits,
        *_unsigned(key),
        num_threads(),
        words.data_ptr(),
        num_words,
        words.itemsize,
    )
    return words


def unpack_scale(words: Tensor, count: int, lane_bits: int, step: Tensor, group: int) -> Tensor:
    x = torch.empty(count, dtype=torch.float32)
    if not 0 <= count <= words.numel() * (8 * words.itemsize // lane_bits):
        raise KernelError(f"{words.numel()} words of {words.dtype} do not hold {count} codes; give their own count")
    library().laconic_unpack_scale(
        pointer("words", words, words.dtype),
        words.numel(),
        words.itemsize,
        count,
        lane_bits,
        _scales("step", step, group, count),
        step.numel(),
        group,
        num_threads(),
        x.data_ptr(),
    )
    return x


def average_words(words: Tensor, lane_bits: int, key: Key) -> Tensor:
    num_rows, num_words = words.shape
    means = torch.empty(num_words, dtype=words.dtype)
    at = pointer("words", words, words.dtype, dims=2)
    library().laconic_average_words(
        at, num_rows, num_words, words.itemsize, lane_bits, *_unsigned(key), num_threads(), means.data_ptr()
    )
    return means


def _scales(name: str, scales: Tensor, group: int, count: int) -> int:
    """A pointer to one scale for all, or to one for each group."""
    return pointer(name, scales, torch.float32, 1 if scales.numel() == 1 else -(-count // group))


def _unsigned(key: Key) -> tuple[int, int]:
    return key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF
