"""What a search for the k largest remembers from step to step.

The GPU starts from the guess that the last step left. The CPU can afford a fresh sample, and only keeps the records.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# What a search remembers: places in a float64 tensor on the device of the data, so that no kernel waits for the host.
GUESS, KTH, MEAN, MARGIN, PASSES, CALLS = range(6)

SHYEST, BOLDEST = 0.5, 0.02  # the margin's bounds
_FIRST_REACH = 1.25  # candidates to aim at, in units of k, until misses and hits have moved the margin
_AFTER_A_MISS, _AFTER_A_HIT = 1.5, 0.99  # a miss costs a pass, a needless candidate almost nothing


def new_search(n: int, k: int, device: torch.device | str = "cpu") -> Tensor:
    """The memory of a search for the k largest of n, before its first step.

    Under a Laplace law P(|x| > t) = exp(-t/b) the k-th largest stands at t = b*ln(n/k), and a threshold that is
    lower by the share ln(c)/ln(n/k) catches c*k entries: the first margin.
    """
    margin = math.log(_FIRST_REACH) / max(math.log(n / k), 1e-9)
    return torch.tensor([0, 0, 0, min(max(margin, BOLDEST), SHYEST), 0, 0], dtype=torch.float64, device=device)


def advance_(search: Tensor, *, kth: float, mean: float, caught_enough: bool, passes: int) -> None:
    """Note what a step found and guess the next threshold: guess = kth * (1 - margin) * min(1, mean / last mean).

    Only the speed of the next step depends on it. A balance that grows leaves the guess too low, which is cheap.
    """
    guess, _, last_mean, margin, all_passes, calls = search.tolist()
    if guess > 0:
        margin = max(BOLDEST, margin * _AFTER_A_HIT) if caught_enough else min(SHYEST, margin * _AFTER_A_MISS)
    change = min(1.0, max(0.5, mean / last_mean)) if last_mean > 0 else 1.0
    guess = kth * (1 - margin) * change
    known = [guess if math.isfinite(guess) else 0.0, kth, mean, margin, all_passes + passes, calls + 1]
    search.copy_(torch.tensor(known, dtype=torch.float64))
