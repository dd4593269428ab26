"""Other ways to the k largest than kernels.withdraw_, which is one pass, and exact whatever the data.

All take what that takes: r += g, find them, take them out. They are here to be compared with: the bisection of the
Laplace paper, the sampled selection of Deep Gradient Compression, torch.topk, and the k largest of every chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laconic.kernels import dispatch as kernels
from laconic.kernels.contract import CALLS, GUESS, PASSES

TOLERANCE = 0.25  # a search for a threshold ends at no more than (1 + this)*k candidates
_MOST_HALVINGS = 40
_HALVINGS_OF_A_PASS = {"cpu": 1, "cuda": 5}  # on a CPU more thresholds cost what they save
_MOST_LOWERINGS = 40
_SAMPLE_SHARE = 0.01
_LOWER = 0.8  # a sampled threshold that caught too few goes down by this


def bisection_(
    balance: Tensor,
    addend: Tensor | None,
    k: int,
    search: Tensor,
    *,
    factor: float = 1.0,
    tolerance: float = TOLERANCE,
) -> tuple[Tensor, Tensor]:
    """t = mean|r| * ln(n/k), as if r were Laplace(0, b), is bisected until k to (1 + tolerance)*k entries reach it.

    P(|r| > t) = exp(-t/b), and the estimate of b is mean|r|; a surplus stays in r (Chen et al., 2021). A pass for the
    mean, one for the largest, one for each halving, and one that takes. On a GPU one pass counts at all thresholds that
    several halvings may come to (ours; they end at the same one). A fit by blocks saved passes of a first step on
    layers of unlike scale (9 to 6), but none over four steps: 6 to 12 either way, 1.2 M entries.
    """
    add_(balance, addend, factor)
    least, most = torch.stack(torch.aminmax(balance)).tolist()
    low, high = 0.0, max(-least, most)
    threshold = float(kernels.mean_magnitude(balance)) * math.log(balance.numel() / k)
    halvings = _HALVINGS_OF_A_PASS[balance.device.type]
    is_close = False
    passes = 2
    for _ in range(_MOST_HALVINGS // halvings):
        thresholds = _thresholds(low, high, threshold, halvings)
        counts = kernels.count_at_least(balance, balance.new_tensor(thresholds)).tolist()
        passes += 1
        at = 0
        while at < len(counts) and not is_close:
            low, high = (thresholds[at], high) if counts[at] >= k else (low, thresholds[at])
            is_close = k <= counts[at] <= (1 + tolerance) * k
            at = 2 * at + (2 if counts[at] >= k else 1)
        if is_close:
            break
        threshold = (low + high) / 2
    search[GUESS] = low
    search[PASSES] += passes
    return kernels.withdraw_(balance, None, k, search)


def _thresholds(low: float, high: float, first: float, halvings: int) -> list[float]:
    """Where so many halvings of (low, high) may count, as a heap: those of i are 2i+1 below it and 2i+2 above it.

    The first of them is in the middle where `first` is out of bounds: beyond the largest entry, or not a number.
    """
    thresholds: list[float] = []
    ranges = [(low, high)]
    for i in range(2**halvings - 1):
        below, above = ranges[i]
        thresholds.append(first if i == 0 and below < first < above else (below + above) / 2)
        ranges += [(below, thresholds[i]), (thresholds[i], above)]
    return thresholds


def sampled_(
    balance: Tensor, addend: Tensor | None, k: int, search: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A threshold from the top of a 1 % sample, lowered till k are caught; torch.topk among those (Lin et al. 2018)."""
    add_(balance, addend, factor)
    sizes = balance.abs()
    sample = sizes[:: round(1 / _SAMPLE_SHARE)]
    rank = min(sample.numel(), max(1, round(k * sample.numel() / sizes.numel())))
    threshold = torch.topk(sample, rank, sorted=False).values.min()
    passes = 1
    while (candidates := (sizes >= threshold).nonzero().squeeze(1)).numel() < k:
        threshold = threshold * _LOWER if passes < _MOST_LOWERINGS else torch.zeros_like(threshold)
        passes += 1
    among = torch.topk(sizes[candidates], k, sorted=False).indices
    note_(search, passes)
    return _take_(balance, candidates[among].sort().values)


def torch_topk_(
    balance: Tensor, addend: Tensor | None, k: int, search: Tensor, *, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """torch.topk of |r|, sorted by position."""
    add_(balance, addend, factor)
    note_(search, 1)
    return _take_(balance, torch.topk(balance.abs(), k, sorted=False).indices.sort().values)


def add_(balance: Tensor, addend: Tensor | None, factor: float) -> None:
    """balance += factor*addend."""
    if addend is not None:
        balance.add_(addend, alpha=factor)


def _take_(balance: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    values = balance[positions]
    balance[positions] = 0
    return positions.to(torch.int32), values


def note_(search: Tensor, passes: int) -> None:
    """Count one selection, and its passes."""
    search[PASSES] += passes
    search[CALLS] += 1


SEARCHES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "threshold": kernels.withdraw_,
    "bisection": bisection_,
    "sampled": sampled_,
    "torch": torch_topk_,
}


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
