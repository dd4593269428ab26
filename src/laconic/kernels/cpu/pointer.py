"""Tensors as raw pointers, after the checks without which a raw pointer crashes."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import KernelError


def pointer(name: str, x: Tensor, dtype: torch.dtype, length: int | None = None) -> int:
    """The address of the first entry of a dense vector of this type, and of this length where one is given."""
    if x.dtype != dtype or x.dim() != 1 or x.device.type != "cpu" or not x.is_contiguous():
        raise KernelError(
            f"{name} is a {x.dim()}-d {x.dtype} tensor on {x.device}; give a contiguous vector of {dtype} on the CPU"
        )
    if length is not None and x.numel() != length:
        raise KernelError(f"{name} has {x.numel()} entries; give {length}")
    return x.data_ptr()


def check_apart(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two vectors that share memory."""
    start, other_start = x.data_ptr(), other.data_ptr()
    if start < other_start + other.nbytes and other_start < start + x.nbytes:
        raise KernelError(f"{name} and {other_name} overlap; give tensors of their own")


def num_threads() -> int:
    """As many threads as torch uses."""
    return torch.get_num_threads()
