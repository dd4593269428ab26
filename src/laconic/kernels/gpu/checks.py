"""What a kernel asks of the tensors it is given; a raw pointer would crash instead."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import KernelError


def check_vector(x: Tensor, dtype: torch.dtype, length: int, name: str) -> None:
    """Raise unless `x` is a contiguous vector of that dtype and length."""
    if x.dtype != dtype or x.numel() != length or not x.is_contiguous():
        given = f"{'' if x.is_contiguous() else 'strided '}{x.dtype}[{x.numel()}]"
        raise KernelError(f"{name} is {given}; give a contiguous {dtype}[{length}]")
