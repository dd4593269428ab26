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


def advance_(search: Tensor, *, k: int, kth: float, mean: float, caught: int, passes: int) -> None:
    """Note what a step found and guess the next threshold: guess = kth * (1 - margin) * min(1, kth / last kth).

    The margin is a secant in the logarithm of the count: if `guess` caught c*k entries, a threshold lower than the k-th
    value by the share (1 - guess/kth) * ln(aim)/ln(c) would have caught aim*k. So it follows how steep the tail is,
    and error feedback makes it steep: what waits stands in a crowd just under the last threshold. Only the
    speed of the next step depends on all this.
    """
    guess, last_kth, _, margin, all_passes, calls = search.tolist()
    if guess > 0 and kth > 0:
        log_reach = math.log(max(caught, 1) / k)
        shortfall = 1 - guess / kth
        wanted = shortfall * LOG_AIM / log_reach if shortfall * log_reach > 0 else PACE * margin
        margin = min(max(wanted, margin / PACE), margin * PACE)
        margin = min(max(margin, BOLDEST), SHYEST)
    change = min(1.0, max(SMALLEST_CHANGE, kth / last_kth)) if last_kth > 0 else 1.0
    guess = kth * (1 - margin) * change
    known = [guess if math.isfinite(guess) else 0.0, kth, mean, margin, all_passes + passes, calls + 1]
    search.copy_(torch.tensor(known, dtype=torch.float64))
