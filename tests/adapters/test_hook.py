"""The pair for register_comm_hook, what frameworks wrap around a module, and states that one rank saves."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.ddp_training import TINY_BUCKET_MB, Net, Run, start
from tests.workers import WorkerPool, equal_everywhere, flat_parameters

TOPK = "topk:rho=0.05"


class FabricLike(nn.Module):
    """Holds a module as Fabric does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module


def hooked(scheme: str, *, named: bool) -> tuple[Run, laconic.HookSession]:
    """As `start`, by the pair."""
    torch.manual_seed(7)
    model = Net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=TINY_BUCKET_MB)
    state, hook = laconic.hook(scheme, model if named else None, pipeline=True)
    ddp.register_comm_hook(state, hook)
    return Run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), None), state


def _as_attached(named: bool) -> dict[str, Any]:
    run, state = hooked(TOPK, named=named)
    before = ""
    try:
        state.stats()
    except laconic.StateError as error:
        before = str(error)
    same = start(TOPK)
    for step in range(6):
        run.step(step)
        same.step(step)
    assert same.session is not None
    kept, others = state.state_dict()["memory"]["residual"], same.session.state_dict()["memory"]["residual"]
    return {
        "before": before,
        "equal": torch.equal(flat_parameters(run.ddp), flat_parameters(same.ddp)),
        "bytes": (state.stats().bytes_out, same.session.stats().bytes_out),
        "names": (set(kept), set(others)),
    }


@pytest.mark.parametrize("named", [True, False])
def test_a_hook_does_what_attach_does(two_workers: WorkerPool, named: bool) -> None:
    for result in two_workers.run(_as_attached, named):
        assert "after the first backward pass" in result["before"]
        assert result["equal"] and result["bytes"][0] == result["bytes"][1]
        mine, theirs = result["names"]
        assert mine == theirs if named else mine == {f"parameter {i}" for i in range(len(theirs))}


def _hook_resumes(named: bool) -> bool:
    run, state = hooked(TOPK, named=named)
    saved: Any = None
    for step in range(8):
        if step == 4:
            saved = state.gather_state(), run.ddp.module.state_dict()
            model = {name: tensor.clone() for name, tensor in saved[1].items()}
        run.step(step)
    again, fresh = hooked(TOPK, named=named)
    again.ddp.module.load_state_dict(model)
    fresh.scatter_state(saved[0])
    for step in range(4, 8):
        again.step(step)
    return torch.equal(flat_parameters(run.ddp), flat_parameters(again.ddp))


@pytest.mark.parametrize("named", [True, False])
def test_a_hook_resumes_before_its_first_bucket(two_workers: WorkerPool, named: bool) -> None:
    assert all(two_workers.run(_hook_resumes, named))


@pytest.mark.parametrize(
    ("scheme", "says"), [("torch-fp16", "PyTorch's own hook"), ("gossip", "exchanges models"), ("topk", "on_mismatch")]
)
def test_a_hook_refuses(scheme: str, says: str) -> None:
    with pytest.raises(laconic.SchemeError, match=says):
        laconic.hook(scheme, on_mismatch="never" if scheme == "topk" else "warn")  # type: ignore[arg-type]


def _attach_to_wrapped() -> list[bool]:
    equal = []
    compiled: Any = torch.compile
    for wrap in (compiled, FabricLike, lambda ddp: FabricLike(compiled(ddp))):
        torch.manual_seed(7)
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=TINY_BUCKET_MB)
        run = Run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), laconic.attach(wrap(ddp), TOPK))
        same = start(TOPK)
        for step in range(3):
            run.step(step)
            same.step(step)
        equal.append(torch.equal(flat_parameters(run.ddp), flat_parameters(same.ddp)))
    return equal


def test_attach_takes_what_frameworks_hand_out(two_workers: WorkerPool) -> None:
    assert all(equal == [True] * 3 for equal in two_workers.run(_attach_to_wrapped))


def _follow_wrapped() -> tuple[list[str], bool]:
    model = Net()
    wrapped = FabricLike(torch.compile(model))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follower = laconic.follow(wrapped, optimizer, "diloco:every=1")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, dist.get_rank() + 1.0)
    optimizer.step()
    follower.step()
    names = list(follower.state_dict()["anchor"])
    follower.close()
    return names, equal_everywhere(flat_parameters(model))


def test_follow_takes_what_frameworks_hand_out(two_workers: WorkerPool) -> None:
    plain = [name for name, _ in Net().named_parameters()]
    for names, equal in two_workers.run(_follow_wrapped):
        assert sorted(names) == sorted(plain) and equal


def _gathered(scheme: str) -> dict[str, Any]:
    """What rank 0 saves in one file is all that others need to go on."""
    whole = start(scheme)
    assert whole.session is not None
    for step in range(4):
        whole.step(step)
    states = whole.session.gather_state()
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    model = {name: tensor.clone() for name, tensor in whole.ddp.module.state_dict().items()}
    for step in range(4, 8):
        whole.step(step)
    again = start(scheme)
    assert again.session is not None
    again.ddp.module.load_state_dict(model)
    again.session.scatter_state(loaded)
    for step in range(4, 8):
        again.step(step)
    refused = ""
    try:
        again.session.scatter_state(None)
    except laconic.StateError as error:
        refused = str(error)
    return {
        "states": None if states is None else len(states),
        "equal": torch.equal(flat_parameters(whole.ddp), flat_parameters(again.ddp)),
        "refused": refused,
    }


@pytest.mark.parametrize("scheme", [TOPK, "sign", "lowrank:rank=2"])
def test_one_rank_saves_for_all(two_workers: WorkerPool, scheme: str) -> None:
    results = two_workers.run(_gathered, scheme)
    assert [result["states"] for result in results] == [2, None]
    assert all(result["equal"] and "rank 0 gave no states" in result["refused"] for result in results)


def _residuals(states: Any, steps: int) -> tuple[Any, float]:
    """(what all keep by gather_state, the sum of what they kept) after some steps from some states."""
    run = start(TOPK)
    assert run.session is not None
    if states is not None:
        run.session.scatter_state(states if dist.get_rank() == 0 else None)
    for step in range(steps):
        run.step(step)
    gathered = run.session.gather_state()
    total = sum(float(t.double().sum()) for s in gathered or () for t in s["memory"]["residual"].values())
    return gathered, total


def test_states_of_four_serve_two(two_workers: WorkerPool, four_workers: WorkerPool) -> None:
    (states, kept), *others = four_workers.run(_residuals, None, 3)
    assert all(other == (None, 0) for other in others)
    (_, now), _ = two_workers.run(_residuals, states, 0)
    assert kept and abs(now - kept) < 1e-4  # float32 sums in another order


def _followers(scheme: str) -> bool:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, follower: Any, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
            follower.step()

    def begun(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, laconic.follow(model, optimizer, scheme)

    torch.manual_seed(7)
    whole = begun(nn.Linear(30, 30))
    steps(*whole, range(5))
    states = whole[2].gather_state()
    model = {name: tensor.clone() for name, tensor in whole[0].state_dict().items()}
    steps(*whole, range(5, 9))
    again = begun(nn.Linear(30, 30))
    again[0].load_state_dict(model)
    again[2].scatter_state(states)
    steps(*again, range(5, 9))
    equal = torch.equal(flat_parameters(whole[0]), flat_parameters(again[0]))
    whole[2].close()
    again[2].close()
    return equal


@pytest.mark.parametrize("scheme", ["streaming:every=4,fragments=2,delay=1", "gossip:mode=matched"])
def test_one_rank_saves_for_followers(two_workers: WorkerPool, scheme: str) -> None:
    assert all(two_workers.run(_followers, scheme))
