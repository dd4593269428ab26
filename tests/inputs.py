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


def thin_matrices(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(bases, factors, places) of some sizes: one of zeros in a column, one whose squares float32 does not hold."""
    draw = torch.Generator().manual_seed(rank)
    sizes = [rank, 33, 768, 1]
    factors = torch.randn(sum(sizes) * rank, generator=draw)
    bases = torch.randn(5 + len(factors), generator=draw)
    places, start = [], 0
    for size in sizes:
        places.append([start + 5, start, size])
        start += size * rank
    factors[places[1][1] : places[2][1]].view(-1, rank)[:, 0] = 0
    factors[places[2][1] : places[3][1]] *= 1e30
    return bases, factors, torch.tensor(places)
