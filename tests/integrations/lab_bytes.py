"""What a trainer sends in the lab: bytes on the interface beside those of stats(), from its first batch to its last.

PYTHONPATH=tests laconic lab run --hosts 2 -- torchrun tests/frameworks/lab_bytes.py accelerate
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integrations import common


def sent() -> int:
    """Bytes that left this host so far."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


class Measured(common.Seen):
    """Notes where the interface stands before the first step."""

    start = 0

    def loss(self, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if not self.batches:
            dist.barrier()
            Measured.start = sent()
        return super().loss(logits, x, y)


def larger_net() -> nn.Sequential:
    """Enough for a step to outweigh what else is said."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 1500), nn.ReLU(), nn.Linear(1500, 600), nn.ReLU(), nn.Linear(600, 5))


def main(name: str) -> None:
    """Train as the tests of a trainer do, and print what was counted and what was seen."""
    dist.init_process_group("gloo")
    trainer: Any = importlib.import_module(f"frameworks.test_{name}")
    trainer.net = common.net = larger_net
    trainer.Seen = Measured
    folder = [] if name in ("accelerate", "fabric") else [Path(tempfile.mkdtemp())]
    options = {"saves": False} if name == "transformers" else {}  # a checkpoint takes the states of all to rank 0
    seen, model, session = trainer.train(*folder, **options)
    end = sent()
    counted = session.stats().bytes_out
    seen_bytes = end - Measured.start
    bare = common.under_bare_ddp(seen.batches)
    same = bare["losses"] == seen.losses and torch.equal(bare["vector"], common.vector(model))
    print(
        f"{name} rank {dist.get_rank()} of {dist.get_world_size()}: stats {counted} interface {seen_bytes} "
        f"ratio {seen_bytes / counted:.4f} as bare DDP {same}",
        flush=True,
    )
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
