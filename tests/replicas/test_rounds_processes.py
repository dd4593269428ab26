"""Outer steps between real processes: the numbers of virtual workers, in the background too, and a worker that ends."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic import PeerError
from laconic.replicas import OuterRounds
from tests.gossiping import Learner, drifted
from tests.parts import outer_texts
from tests.workers import WorkerPool


def _drift(text: str, steps: int) -> tuple[Tensor, int, int]:
    learner = Learner(text, dist.get_rank(), laconic.follow, 0.1)
    assert isinstance(learner.follower.policy, OuterRounds)
    learner.follower.policy.rehearse()  # as follow() does on a GPU: nothing is counted or kept
    for number in range(steps):
        learner.drift(number)
    learner.follower.settle()
    found = learner.follower.vector.read(), learner.follower.stats().bytes_out, learner.follower.stats().rounds
    learner.follower.average_()
    learner.follower.close()
    return found


@pytest.mark.parametrize("text", outer_texts())
def test_processes_and_virtual_workers_agree_on_the_same_numbers(four_workers: WorkerPool, text: str) -> None:
    """Where the network adds floats, in another order; elsewhere bit for bit."""
    there = four_workers.run(_drift, text, 9)
    here = [learner.follower for learner in drifted(text, 4, 9)]
    adds_integers = "levels" in text or "streaming" in text
    adds_floats = (laconic.parse(text).exchange.adds_in_flight and not adds_integers) or "warmup" in text
    for follower, (model, bytes_out, turns) in zip(here, there, strict=True):
        follower.settle()
        assert turns == follower.stats().rounds and bytes_out == follower.stats().bytes_out
        if adds_floats:
            assert torch.allclose(follower.vector.read(), model, atol=1e-3)  # 16 bits of a drift of 0.1
        else:
            assert torch.equal(follower.vector.read(), model)


def _in_nodes(text: str, steps: int, on_host: bool) -> tuple[Tensor, int]:
    """Two nodes of two processes, which make the same steps inside a node."""
    rank = dist.get_rank()
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    learner = Learner(text, rank // 2, partial(laconic.follow, node_group=nodes[rank // 2], on_host=on_host), 0.1)
    for number in range(steps):
        learner.drift(number)
    learner.follower.settle()
    found = learner.follower.vector.read(), learner.follower.stats().bytes_out
    learner.follower.close()
    return found


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("text", ["local:every=3,quantize=none", "local:every=4,quantize=none,fragments=2,delay=2"])
def test_processes_of_a_node_exchange_a_share_each(fresh_workers: WorkerPool, text: str, on_host: bool) -> None:
    """Models are those of as many workers as there are nodes, and bytes between nodes go once."""
    there = fresh_workers.run(_in_nodes, text, 9, on_host)
    here = [learner.follower for learner in drifted(text, 2, 9)]
    for rank, (model, _) in enumerate(there):
        here[rank // 2].settle()
        assert torch.allclose(here[rank // 2].vector.read(), model, atol=1e-6)
        assert torch.equal(model, there[rank // 2 * 2][0])
    between = sum(bytes_out for _, bytes_out in there)
    assert between == pytest.approx(2 * here[0].stats().bytes_out, rel=0.1)  # buffers go with each


def _other_outer() -> str:
    rate = 0.5 if dist.get_rank() == 2 else 1.0
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        laconic.follow(model, optimizer, "local", outer_optimizer=lambda anchors: torch.optim.SGD(anchors, lr=rate))
    except laconic.SchemeError as error:
        return str(error)
    return ""


def test_ranks_that_give_other_outer_optimizers_are_told(four_workers: WorkerPool) -> None:
    said = four_workers.run(_other_outer)
    assert said[0] == "rank 2 gave another outer_optimizer=, or inner momentum; give the same on all ranks"
    assert said[2] == "rank 0 gave another outer_optimizer=, or inner momentum; give the same on all ranks"


def _end_early(text: str) -> str:
    learner = Learner(text, dist.get_rank(), laconic.follow, 0.1)
    for number in range(4):
        learner.drift(number)
    if dist.get_rank() == 1:
        learner.follower.close()  # its data has ended
        return ""
    try:
        for number in range(4, 12):
            learner.drift(number)
    except PeerError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    "text", ["local:every=2,quantize=none", "streaming:every=2,fragments=2,delay=1", "noloco:every=2"]
)
def test_a_worker_whose_data_ends_early_is_one_line_for_the_rest(fresh_workers: WorkerPool, text: str) -> None:
    said = fresh_workers.run(_end_early, text)
    assert said[1] == ""
    for line in (said[0], said[2], said[3]):
        assert "rank" in line and "\n" not in line and line != "nothing was said"
