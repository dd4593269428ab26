"""Shared by the benches: gradients of several shapes, and a clock that rival pieces of work take turns at."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from laconic_lab.tasks import TASKS

_NUM_LAYERS = 40
_STUDENT_FREEDOM = 3.0


def laplace(n: int, generator: torch.Generator) -> Tensor:
    """P(|x| > t) = exp(-t)."""
    device = generator.device
    sign = torch.randint(0, 2, (n,), generator=generator, device=device).mul_(2).sub_(1)
    return torch.empty(n, device=device).exponential_(generator=generator) * sign


def normal(n: int, generator: torch.Generator) -> Tensor:
    """Lighter tails than Laplace."""
    return torch.randn(n, generator=generator)


def student(n: int, generator: torch.Generator) -> Tensor:
    """Heavy tails: three degrees of freedom, so P(|x| > t) falls like t^-3."""
    squares = torch.zeros(n)
    for _ in range(int(_STUDENT_FREEDOM)):
        squares += torch.randn(n, generator=generator) ** 2
    return torch.randn(n, generator=generator) / (squares / _STUDENT_FREEDOM).sqrt_()


def layers(n: int, generator: torch.Generator) -> Tensor:
    """40 normal layers of equal size, with scales from 1e-3 to 1 in random order."""
    scales = torch.logspace(-3, 0, _NUM_LAYERS)[torch.randperm(_NUM_LAYERS, generator=generator)]
    return torch.randn(n, generator=generator) * scales.repeat_interleave(-(-n // _NUM_LAYERS))[:n]


def captured(n: int, generator: torch.Generator) -> Tensor:
    """Gradients of the fashion-mnist CNN while it trains, those of one step after the other until there are n."""
    task = TASKS["fashion-mnist"]
    data = task.load(None, None)
    torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    kind = task.model(None)
    model = kind.make(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=kind.training.lr, momentum=kind.training.momentum)
    steps: list[Tensor] = []
    while sum(one.numel() for one in steps) < n:
        batch = torch.randint(len(data.train_targets), (kind.training.batch,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(data.prepare(data.train_inputs[batch])), data.train_targets[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    return torch.cat(steps)[:n]


DISTRIBUTIONS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    law.__name__: law for law in (laplace, normal, student, layers, captured)
}


def median_seconds(
    works: Mapping[str, Callable[[], Any]], device: str = "cpu", rounds: int = 7, calls: int = 1
) -> dict[str, float]:
    """Median over rounds of the seconds that a call of each work takes; on CUDA by events, over `calls` in a row."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append((_cuda_seconds if device == "cuda" else _cpu_seconds)(work, calls))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _cpu_seconds(work: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def _cuda_seconds(work: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
