"""Adam's kin learn less from sparse gradients: one line of advice, once, where they step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.adapters.optimizers import AdamAdvice
from laconic.optim import Muon
from laconic.recipes import parse
from tests.logs import logged
from tests.workers import WorkerPool

ADVICE = "learns less from the sparse gradients of"


class FusedThing(torch.optim.Optimizer):
    """One of another library, that names no betas; what it keeps tells."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def _advice(scheme: str, make: Callable[[nn.Module], torch.optim.Optimizer], rank: int = 0) -> list[str]:
    """The lines after three steps of one optimizer, and one of another that has other parameters."""
    model = nn.Linear(8, 8)
    stranger = torch.optim.Adam(nn.Linear(2, 2).parameters())
    advice = AdamAdvice.where_due(parse(scheme), list(model.parameters()), rank)  # type: ignore[arg-type]
    optimizer = make(model)
    with logged() as lines:
        stranger.step()
        assert not lines
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    if advice is not None:
        advice.close()
    return lines


@pytest.mark.parametrize(
    "make", [getattr(torch.optim, name) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adafactor")]
)
def test_adams_kin_on_sparse_gradients_is_told_once(make: Any) -> None:
    (line,) = _advice("topk:rho=0.01", lambda model: make(model.parameters()))
    assert line.startswith(f"{make.__name__} {ADVICE} topk:rho=0.01") and "\n" not in line
    assert "'streaming' (laconic.follow)" in line and "'lowrank:rank=16'" in line


def test_so_are_optimizers_of_other_libraries() -> None:
    (line,) = _advice("topk:rho=0.01", lambda model: FusedThing(model.parameters()))
    assert line.startswith(f"FusedThing {ADVICE}")
    (line,) = _advice("topk:rho=0.01", Muon)
    assert line.startswith(f"Muon {ADVICE}") and "or 'maxnorm:bits=4' where" in line
    (line,) = _advice("topk:rho=0.01", lambda model: torch.optim.Muon([model.weight]))  # type: ignore[arg-type]
    assert line.startswith(f"Muon {ADVICE}") and "or 'maxnorm:bits=4' where" in line


@pytest.mark.parametrize(
    ("scheme", "num_lines"),
    [
        *((scheme, 1) for scheme in ("randk-maxnorm:rho=0.01", "overlap:rho=0.01", "laplace:rho=0.01")),
        *((scheme, 0) for scheme in ("dense", "bf16", "maxnorm:bits=4", "sign", "lowrank:rank=2", "silent")),
    ],
)
def test_whole_gradients_of_few_bits_or_low_rank_are_for_adam_too(scheme: str, num_lines: int) -> None:
    assert len(_advice(scheme, lambda model: torch.optim.AdamW(model.parameters()))) == num_lines


def test_a_scheme_that_carries_momentum_wants_an_adam_without() -> None:
    assert not _advice("dgc:rho=0.01", lambda model: torch.optim.AdamW(model.parameters(), betas=(0.0, 0.95)))
    (line,) = _advice("dgc:rho=0.01", lambda model: torch.optim.AdamW(model.parameters()))
    assert line == "dgc:rho=0.01 carries momentum, and so does AdamW; give it betas=(0.0, ...)"


def test_sgd_and_other_ranks_hear_nothing() -> None:
    assert not _advice("topk:rho=0.01", lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert not _advice("topk:rho=0.01", lambda model: torch.optim.AdamW(model.parameters()), rank=1)


def _attached(sharded: bool) -> list[str]:
    """What a rank logs in three steps of AdamW, and in three after close()."""
    model: Any = nn.Linear(8, 8)
    group = None
    if sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        group = mesh.get_group("replicate")
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with logged() as lines:
        session = laconic.attach(model, "topk:rho=0.05", group=group)
        for _ in range(3):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.close()
        torch.optim.AdamW(model.parameters()).step()
    return [line for line in lines if "sparse gradients" in line]


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_attach_advises_on_rank_0_alone(fresh_workers: WorkerPool, sharded: bool) -> None:
    first, *others = fresh_workers.run(_attached, sharded)
    assert len(first) == 1 and first[0].startswith("AdamW") and others == [[], [], []]
