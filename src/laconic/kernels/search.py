"""What a search for the k largest remembers from step to step.

The GPU starts from the guess that the last step left. The CPU can afford a fresh sample, and only keeps the records.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# What a search remembers: places in a float64 tensor on the device of the data, so that no kernel waits for the host.
GUESS, KTH, MEAN, MARGIN, PASSES, CALLS = range(6)

LOG_AIM = math.log(1.4)  # candidates to aim at, in units of k; fewer than k would cost passes
SHYEST, BOLDEST = 0.3, 0.0005  # the margin's bounds
PACE = 2.0  # a margin at most doubles or halves in a step
SMALLEST_CHANGE = 0.5


def new_search(n: int, k: int, device: torch.device | str = "cpu") -> Tensor:
    """The memory of a search for the k largest of n, before its first step.

    Under a Laplace law P(|x| > t) = exp(-t/b) the k-th largest stands at t = b*ln(n/k), and a threshold that is
    lower by the share ln(c)/ln(n/k) catches c*k entries: the first margin.
    """
    margin = LOG_AIM / max(math.log(n / k), 1e-9)
    return torch.tensor([0, 0, 0, min(max(margin, BOLDEST), SHYEST), 0, 0], dtype=torch.float64, device=device)


def note_(search: Tensor, *, kth: float, mean: float, passes: int) -> None:
    """Keep the records of a step; the guess of the next is the GPU's alone (gpu/withdraw_rank.py)."""
    records = search.cpu().numpy()
    records[KTH] = kth
    records[MEAN] = mean
    records[PASSES] += passes
    records[CALLS] += 1
    if search.device.type != "cpu":
        search.copy_(torch.from_numpy(records))
