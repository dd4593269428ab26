"""A small model under DDP with many buckets, trained the same way by every test over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic

TINY_BUCKET_MB = 0.005  # about 1,300 float32: every layer below fills a bucket of its own


class Net(nn.Module):
    """Parameters of mixed shapes, some too small to sparsify."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Linear(8 * 8 * 8, 40)
        self.middle = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
        self.head = nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(torch.relu(self.middle(torch.relu(self.body(x)))))  # type: ignore[no-any-return]


@dataclass
class Run:
    """A DDP model with its optimizer and session."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    session: laconic.Attached | None

    def step(self, number: int) -> float:
        x, y = batch(number)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.ddp(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.detach())


def num_buckets(session: laconic.Attached | None) -> int:
    """The buckets of the last step."""
    assert session is not None
    return len(session.state_dict()["buckets"])


def start(
    scheme: str | None,
    model: nn.Module | None = None,
    *,
    bucket_mb: float = TINY_BUCKET_MB,
    timeout_s: float | None = None,
    lr: float = 0.05,
    **ddp_options: Any,
) -> Run:
    """DDP over at least three buckets (one for PowerSGD, which aborts otherwise) with a scheme attached."""
    torch.manual_seed(7)
    model = model if model is not None else Net()
    one_bucket = "powersgd" in (scheme or "")
    ddp = DistributedDataParallel(model, bucket_cap_mb=100 if one_bucket else bucket_mb, **ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    return Run(ddp, optimizer, laconic.attach(ddp, scheme, pipeline=True, timeout_s=timeout_s) if scheme else None)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """This rank's batch at a step: a blob whose place tells the class."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    y = torch.randint(10, (8,), generator=generator)
    x = 0.3 * torch.randn(8, 1, 8, 8, generator=generator)
    x[torch.arange(8), 0, y // 2, 3 * (y % 2)] += 2
    return x, y
