"""Vectors on which selection goes wrong, if it does."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (1, 2, 31, 32, 33, 1000, 16_385, 100_001)


def vectors(n: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=generator)
    outlier = normal.clone()
    outlier[n // 2] = 1e30
    strange = normal.clone()
    strange[:: max(1, n // 3)] = torch.nan
    strange[n // 2] = -torch.inf
    mostly_zero = torch.zeros(n)
    mostly_zero[:: max(1, n // 5)] = 1e-20
    return {
        "normal": normal,
        "cubed": normal**3,
        "zeros": torch.zeros(n),
        "constant": torch.full((n,), -2.5),
        "ties": torch.randint(-2, 3, (n,), generator=generator).float(),
        "outlier": outlier,
        "nan and inf": strange,
        "denormal": normal * 1e-42,
        "mostly zero": mostly_zero,
        "sorted": normal.sort().values,  # a strided sample sees every part of it
        "large in one place": torch.cat([normal[: n - n // 50] * 1e-6, normal[n - n // 50 :]]),
    }
