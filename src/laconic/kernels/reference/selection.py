"""Which entries are largest, and taking them out; what a search for them remembers from step to step.

The GPU starts from the guess that the last step left. The CPU can afford a fresh sample, and only keeps the records.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.kernels.host import nonzero
from laconic.kernels.registry import kernel

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


_SAMPLE_ENTRIES = 16_384
_CHUNK = 1 << 20


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as int32 bit patterns, which order like |x| with NaN above Inf; `x` is float32."""
    return x.view(torch.int32) & 0x7FFFFFFF


@kernel
def all_finite(x: Tensor, below: float = math.inf) -> bool:
    """Whether all |x| are below a bound, and none is NaN. The largest |x| tells; a sum could accuse finite data."""
    if x.numel() == 0:
        return True
    low, high = torch.aminmax(x)
    return bool((low > -below) & (high < below))


@kernel
def flag_nonfinite_(flag: Tensor, x: Tensor, below: float = math.inf) -> None:
    """Set `flag`, one int32, unless all |x| are below a bound and none is NaN; whoever wants to know looks later."""
    low, high = torch.aminmax(x)
    flag |= ~((low > -below) & (high < below))


@kernel
def zero_if_(x: Tensor, flag: Tensor) -> None:
    """x = 0 where `flag`, one int32, is set."""
    x.masked_fill_(flag.bool(), 0)


@kernel
def mean_magnitude(x: Tensor) -> Tensor:
    """The mean of |x|, a 0-d float64; a float32 sum over 25 M entries would be off by 5 %."""
    sums = [chunk.abs().to(torch.float64).sum() for chunk in torch.split(x, _CHUNK)]
    return torch.stack(sums).sum() / x.numel()


@kernel
def count_at_least(x: Tensor, thresholds: Tensor) -> Tensor:
    """How many |x| reach each of the float32 `thresholds`, int64."""
    bits = magnitude_bits(x)
    least = magnitude_bits(thresholds)
    return torch.stack([(bits >= one).sum() for one in least])


@kernel
def compact(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Ascending int32 positions and values of the |x| that reach `threshold`."""
    least = magnitude_bits(torch.tensor(threshold, dtype=torch.float32, device=x.device))
    positions = nonzero(magnitude_bits(x) >= least)
    return positions.to(torch.int32), x[positions]


@kernel
def withdraw_(
    balance: Tensor, addend: Tensor | None, k: int, search: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """balance += factor*addend, each product and sum rounded; then take the exactly k largest |balance| out of it.

    Returns their positions (ascending, int32) and values, and leaves zeros in their places; of equal ones the first
    are taken, NaN is larger than Inf. `search` (of kernels.new_search) only says where to look first.
    """
    if addend is not None:
        balance.add_(addend if factor == 1 else addend * factor)
    mean = float(mean_magnitude(balance))
    positions, passes = _top_k(balance, k)
    values = balance[positions]
    balance[positions] = 0
    kth = float(values.abs().nan_to_num(torch.inf, torch.inf).min())
    note_(search, kth=kth, mean=mean, passes=passes)
    return positions.to(torch.int32), values


def _top_k(x: Tensor, k: int) -> tuple[Tensor, int]:
    """Positions of the k largest |x|, and the passes it took; of equal ones the first are taken.

    torch.topk leaves the order of ties open, so it only gives the k-th value; and it ranks only the candidates above a
    threshold that a sample suggests: 3 ms instead of 21 for the 1.2 M entries of a small net, on one thread.
    """
    bits = magnitude_bits(x)
    if k >= bits.numel():
        return torch.arange(bits.numel(), device=x.device), 1
    candidates = nonzero(bits >= _likely_threshold(bits, k))
    passes = 1
    if candidates.numel() < k:
        candidates = torch.arange(bits.numel(), device=x.device)
        passes = 2
    ranked = bits[candidates]
    kth = torch.topk(ranked, k, sorted=False).values.min()
    chosen = ranked > kth
    ties = nonzero(ranked == kth)
    chosen[ties[: k - int(chosen.sum())]] = True
    return candidates[chosen], passes


def _likely_threshold(bits: Tensor, k: int) -> Tensor:
    """A value that about 1.3*k entries reach, most likely; only the speed of the caller depends on it."""
    sample = bits[:: max(1, bits.numel() // _SAMPLE_ENTRIES)]
    expected = k * sample.numel() / bits.numel()
    rank = min(sample.numel(), round(expected + 4 * expected**0.5 + 4))  # four sigma of a binomial, and a few
    return torch.topk(sample, rank, sorted=False).values.min()
