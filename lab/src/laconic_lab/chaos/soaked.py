"""A rank that trains on and on: a scheme of each family for some steps, then the next, in the same process."""

from __future__ import annotations

import os
import time

import torch
import torch._dynamo  # DDP imports it when it is first built
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.api import attach, follow

_SCHEMES = (
    "dense",
    "topk:rho=0.05",
    "maxnorm",
    "topk:rho=0.05,exchange=server",
    "overlap:rho=0.05",
    "gossip",
    "diloco:every=4",
)
_STEPS = 60  # under one scheme
_PAUSE_S = 0.01  # a soak shares its machine
_TIMEOUT_S = 60.0

torch.set_num_threads(1)


def train_on(variables: dict[str, str], folder: str) -> None:
    """Train until this process is ended."""
    os.environ.update(variables)
    os.chdir(folder)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    while True:
        for scheme in _SCHEMES:
            _train(scheme, draw)
            dist.barrier()


def _train(scheme: str, draw: torch.Generator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    follows = scheme.startswith(("gossip", "diloco"))
    trained: nn.Module = model if follows else DistributedDataParallel(model)
    follower = follow(model, optimizer, scheme, timeout_s=_TIMEOUT_S) if follows else None
    session = None if isinstance(trained, nn.Sequential) else attach(trained, scheme, timeout_s=_TIMEOUT_S)
    for _ in range(_STEPS):
        x = torch.randn(16, 64, generator=draw)
        loss = nn.functional.cross_entropy(trained(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if follower is not None:
            follower.step()
        time.sleep(_PAUSE_S)
    if follower is not None:
        follower.average_()
        follower.close()
    if session is not None:
        session.close()
