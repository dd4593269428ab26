"""The k largest of every chunk of a vector, or its largest runs, in plain torch: a few passes, whatever the data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels.searches import add_, note_


def withdraw_of_chunks_(
    balance: Tensor, addend: Tensor | None, k: int, search: Tensor, *, factor: float = 1.0, chunk: int
) -> tuple[Tensor, Tensor]:
    """What kernels.withdraw_ returns, but the same number from each chunk: ties to the lower position.

    The vector is a whole number of chunks, or one that is shorter; k is that number times theirs.
    """
    add_(balance, addend, factor)
    note_(search, 1)
    chunk = min(chunk, balance.numel())
    k = k * chunk // balance.numel()
    sizes = balance.view(-1, chunk).abs()
    smallest = sizes.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    larger = sizes > smallest
    ties = sizes == smallest
    num_ties = k - larger.sum(1, keepdim=True)
    taken = larger | (ties & (ties.cumsum(1) <= num_ties))
    positions = taken.view(-1).nonzero().view(-1)
    values = balance.index_select(0, positions)
    balance.index_fill_(0, positions, 0)
    return positions.to(torch.int32), values


def withdraw_runs_(
    balance: Tensor, addend: Tensor | None, k: int, search: Tensor, *, factor: float = 1.0, length: int
) -> tuple[Tensor, Tensor]:
    """What kernels.withdraw_ returns, but of the k/length runs with the largest root mean square; ties to the lower.

    The vector is a whole number of runs, or one that is shorter and goes whole. The squares are added in float64, so
    that neither they nor their order shows in a float32; a mean of theirs is never beyond the largest entry.
    """
    add_(balance, addend, factor)
    length = min(length, balance.numel())
    rows = balance.view(-1, length)
    energy = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).div_(math.sqrt(length)).to(torch.float32)
    runs, _ = kernels.withdraw_(energy, None, k // length, search)
    values = rows[runs].view(-1)
    rows.index_fill_(0, runs.to(torch.int64), 0)
    positions = runs.unsqueeze(1) * length + torch.arange(length, dtype=torch.int32, device=runs.device)
    return positions.view(-1), values
