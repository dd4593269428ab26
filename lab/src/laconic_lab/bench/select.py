"""The cost of a selection, against torch.topk, sampled selection, the Laplace paper's, and a copy of the same size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.select import SEARCHES
from laconic_lab.bench.common import DISTRIBUTIONS, median_seconds

_STEPS_BEFORE = {"cpu": 8, "cuda": 100}  # until the residual is in its stride; on a CPU nothing depends on it
_COPY_BYTES, _FLOOR_BYTES = 8, 12  # an entry: read and write; read gradient and residual, write the residual
_CUDA_ENTRIES_A_ROUND = 1_000_000_000  # calls are timed many in a row, as on a stream that the host runs ahead of


@dataclass(frozen=True)
class SelectBench:
    """One size, share and law; the times are medians of rounds in which all took turns."""

    n: int
    k: int
    dist: str
    device: str
    kernels: str
    threads: int
    ms: dict[str, float]
    speedup_topk: float  # times faster than add, torch.topk, sort, gather, zero
    speedup_sampled: float
    over_copy: float  # times as long as copying the gradient
    over_floor: float  # times as long as 12 bytes an entry take at the copy's bandwidth
    passes: float  # over the entries, per call
    bisection_over_topk: float  # the Laplace paper's figure: times faster than torch.topk that its bisection is
    bisection_over_sampled: float
    bisection_passes: float
    exact: bool  # the same entries and the same residual as the reference took


def bench_select(n: int, rho: float, dist: str, device: str = "cpu", rounds: int = 7, seed: int = 0) -> SelectBench:
    """Withdraw k = round(rho*n) of n at a time from a residual in its stride, threshold from the step before."""
    k = min(n, max(1, round(rho * n)))
    generator = torch.Generator().manual_seed(seed)
    stream = [DISTRIBUTIONS[dist](n, generator).to(device) for _ in range(2)]
    residual = torch.zeros(n, device=device)
    search = kernels.new_search(n, k, device)
    for step in range(_STEPS_BEFORE[device]):
        kernels.withdraw_(residual, stream[step % 2], k, search)
    exact = _equals_reference(residual, stream[0], k, search)
    before = search.tolist()
    target = torch.empty(n, device=device)
    works: dict[str, Callable[[], object]] = {
        "withdraw": _stepper(kernels.withdraw_, residual, stream, k, search),
        "copy": lambda: target.copy_(stream[0]),
    }
    searches = {name: kernels.new_search(n, k, device) for name in ("torch", "sampled", "bisection")}
    for name, own in searches.items():
        works[name] = _stepper(SEARCHES[name], residual.clone(), stream, k, own)
    calls = max(1, _CUDA_ENTRIES_A_ROUND // n) if device == "cuda" else 1
    seconds = median_seconds(works, device, rounds, calls)
    after = search.tolist()
    bisected = searches["bisection"].tolist()
    return SelectBench(
        n=n,
        k=k,
        dist=dist,
        device=device,
        kernels=kernels.backend(device),
        threads=torch.get_num_threads(),
        ms={name: 1e3 * taken for name, taken in seconds.items()},
        speedup_topk=seconds["torch"] / seconds["withdraw"],
        speedup_sampled=seconds["sampled"] / seconds["withdraw"],
        over_copy=seconds["withdraw"] / seconds["copy"],
        over_floor=seconds["withdraw"] / (seconds["copy"] * _FLOOR_BYTES / _COPY_BYTES),
        passes=(after[kernels.PASSES] - before[kernels.PASSES]) / (after[kernels.CALLS] - before[kernels.CALLS]),
        bisection_over_topk=seconds["torch"] / seconds["bisection"],
        bisection_over_sampled=seconds["sampled"] / seconds["bisection"],
        bisection_passes=bisected[kernels.PASSES] / bisected[kernels.CALLS],
        exact=exact,
    )


def _stepper(
    withdraw_: Callable[..., object], residual: Tensor, stream: list[Tensor], k: int, search: Tensor
) -> Callable[[], object]:
    """One step after the other, each with the next gradient of the stream."""
    step = 0

    def work() -> object:
        nonlocal step
        step += 1
        return withdraw_(residual, stream[step % len(stream)], k, search)

    return work


def _equals_reference(residual: Tensor, gradient: Tensor, k: int, search: Tensor) -> bool:
    balances = residual.clone(), residual.clone()
    selected = kernels.withdraw_(balances[0], gradient, k, search.clone())
    expected = kernels.reference.withdraw_(balances[1], gradient, k, search.clone())
    return all(torch.equal(a, b) for a, b in zip((*selected, balances[0]), (*expected, balances[1]), strict=True))
