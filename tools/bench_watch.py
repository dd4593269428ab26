"""What it costs a step to notice gradients that nobody uses: attach(unused_steps="warn") beside "ignore".

One process, in which DDP and a session do everything but wait for others. Two models step in turns, so that the load of
the machine is the same for both; what is watched runs in the training thread, whose own time no load changes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

How = Literal["warn", "ignore"]
_CLOCKS = (time.perf_counter, time.thread_time)


def main() -> None:
    """Measure both, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="topk:rho=0.01")
    parser.add_argument("--width", type=int, default=256, help="of each of eight layers")
    parser.add_argument("--steps", type=int, default=60, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ratios, costs = [], []
    for number in range(arguments.rounds):
        wall_ms, thread_ms = _round(arguments)
        ratios.append(wall_ms["warn"] / wall_ms["ignore"])
        costs.append(thread_ms["warn"] - thread_ms["ignore"])
        print(
            f"round {number}: a step of {wall_ms['ignore']:.2f} ms takes {ratios[-1]:.4f} times as long where it is "
            f"watched, and {1e3 * costs[-1]:.0f} us more of the training thread",
            flush=True,
        )
    print(f"medians: {statistics.median(ratios):.4f} times, {1e3 * statistics.median(costs):.0f} us")
    dist.destroy_process_group()


def _round(arguments: argparse.Namespace) -> tuple[dict[How, float], dict[How, float]]:
    """(wall time of a step in ms, time of its thread), as medians, the first ten left out."""
    hows: tuple[How, ...] = ("warn", "ignore")
    runs = {how: _Run(arguments, how) for how in hows}
    for number in range(10 + arguments.steps):
        for how in hows if number % 2 else reversed(hows):
            runs[how].step()
    for run in runs.values():
        run.session.close()
    return tuple({how: statistics.median(runs[how].took[clock][10:]) for how in hows} for clock in _CLOCKS)  # type: ignore[return-value]


class _Run:
    def __init__(self, arguments: argparse.Namespace, how: How) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(arguments.width, arguments.width) for _ in range(8)]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        self.session = laconic.attach(self.ddp, arguments.scheme, unused_steps=how)
        self.x = torch.randn(16, arguments.width)
        self.took: dict[Callable[[], float], list[float]] = {clock: [] for clock in _CLOCKS}

    def step(self) -> None:
        """Take one step, and note its times in ms."""
        start = [clock() for clock in _CLOCKS]
        self.optimizer.zero_grad()
        self.ddp(self.x).square().mean().backward()
        self.optimizer.step()
        for clock, before in zip(_CLOCKS, start, strict=True):
            self.took[clock].append(1e3 * (clock() - before))


if __name__ == "__main__":
    main()
