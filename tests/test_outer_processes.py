"""Outer steps between real processes: the numbers of virtual workers, in the background too, and a worker that ends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from gossiping import Learner, drifted
from laconic import PeerError
from parts import outer_texts
from workers import WorkerPool


def _drift(text: str, steps: int) -> tuple[Tensor, int, int]:
    learner = Learner(text, dist.get_rank(), laconic.follow, 0.1)
    for number in range(steps):
        learner.drift(number)
    learner.follower.settle()
    found = learner.follower.read(), learner.follower.stats().bytes_out, learner.follower.stats().turns
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
        assert turns == follower.stats().turns and bytes_out == follower.stats().bytes_out
        if adds_floats:
            assert torch.allclose(follower.read(), model, atol=1e-3)  # 16 bits of a drift of 0.1
        else:
            assert torch.equal(follower.read(), model)


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


@pytest.mark.parametrize("text", ["local:every=2,quantize=none", "streaming:every=2,fragments=2,delay=1"])
def test_a_worker_whose_data_ends_early_is_one_line_for_the_rest(fresh_workers: WorkerPool, text: str) -> None:
    said = fresh_workers.run(_end_early, text)
    assert said[1] == ""
    for line in (said[0], said[2], said[3]):
        assert "rank" in line and "\n" not in line and line != "nothing was said"
