"""The k largest of every chunk of a vector, in plain torch: a few passes, whatever the data."""

from __future__ import annotations

import torch
from torch import Tensor


def withdraw_of_chunks_(balance: Tensor, chunk: int, k: int) -> tuple[Tensor, Tensor]:
    """(ascending int32 positions, values) of the k largest |r| of each chunk, which become zero; ties to the lower.

    The vector is a whole number of chunks.
    """
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
