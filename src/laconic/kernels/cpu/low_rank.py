"""Orthonormal bases of thin matrices, many at once."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.contract import check_places
from laconic.kernels.cpu.library import library, pointer


def orthonormal_(bases: Tensor, factors: Tensor, places: Tensor, rank: int) -> None:
    check_places(bases, factors, places, rank)
    library().laconic_orthonormal(
        pointer("bases", bases, torch.float32),
        pointer("factors", factors, torch.float32),
        pointer("places", places, torch.int64, dims=2),
        len(places),
        rank,
    )
