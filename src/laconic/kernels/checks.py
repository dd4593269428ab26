"""What a kernel asks of the tensors it is given; a raw pointer would crash instead."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import KernelError


def check_vector(x: Tensor, dtype: torch.dtype, length: int, name: str, *, dims: int = 1) -> None:
    """Raise unless `x` is a contiguous vector (or matrix, with dims=2) of that dtype, with that many entries."""
    if x.dtype != dtype or x.numel() != length or x.dim() != dims or not x.is_contiguous():
        given = f"{'' if x.is_contiguous() else 'strided '}{x.dtype}{list(x.shape)}"
        raise KernelError(f"{name} is {given}; give a contiguous {dtype}[{length}]")


def check_rows(x: Tensor, dtype: torch.dtype, least: int, name: str) -> None:
    """Raise unless `x` is a matrix of that dtype whose rows are contiguous and have at least that many entries."""
    if x.dtype != dtype or x.dim() != 2 or x.stride(1) != 1 or x.shape[1] < least:
        raise KernelError(f"{name} is {x.dtype}{list(x.shape)}; give rows of {dtype}, each of {least} entries or more")


def check_places(bases: Tensor, factors: Tensor, places: Tensor, rank: int) -> None:
    """Raise unless each row of `places`, (start of a basis, start of its factor, rows), lies within both."""
    check_vector(places, torch.int64, 3 * len(places), "places", dims=2)
    starts, firsts, rows = places.unbind(1)
    ends = [(starts + rank * rows).max(), (firsts + rank * rows).max()] if len(places) else []
    if (
        rank < 1
        or any(end > len(whole) for end, whole in zip(ends, (bases, factors), strict=False))
        or (places < 0).any()
    ):
        raise KernelError(f"places reach beyond {len(bases)} entries of bases or {len(factors)} of factors")
