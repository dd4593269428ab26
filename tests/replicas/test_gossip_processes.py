"""Gossip between real processes: the same numbers as virtual workers, no mass lost, a killed peer, CUDA aside."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.replicas import consensus, gather
from tests.gossiping import FREE_TEXTS, MATCHED_TEXTS, Learner, drifted
from tests.workers import WorkerPool


def _learner(text: str, lr: float = 0.1) -> Learner:
    return Learner(text, dist.get_rank(), laconic.follow, lr)


def _matched(text: str, steps: int) -> tuple[Tensor, int]:
    learner = _learner(text)
    for number in range(steps):
        learner.drift(number)
    found = learner.follower.vector.read(), learner.follower.stats().bytes_out
    learner.follower.close()
    return found


@pytest.mark.parametrize("text", MATCHED_TEXTS)
def test_processes_and_virtual_workers_gossip_the_same_numbers(fresh_workers: WorkerPool, text: str) -> None:
    over_gloo = fresh_workers.run(_matched, text, 12)
    virtual = [(one.follower.vector.read(), one.follower.stats().bytes_out) for one in drifted(text, 4, 12)]
    for (here, sent_here), (there, sent_there) in zip(virtual, over_gloo, strict=True):
        assert torch.equal(here, there) and sent_here == sent_there


def _frozen(text: str, steps: int) -> dict[str, Any]:
    learner = _learner(text)
    with torch.no_grad():
        for p in learner.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(dist.get_rank())))
    before = learner.follower.vector.read()
    for _ in range(steps):
        learner.follower.step()
        time.sleep(0.001 * dist.get_rank())  # uneven speed
    learner.follower.settle()
    stats = learner.follower.stats()
    learner.follower.close()
    return {"before": before, "after": learner.follower.vector.read(), "asked": stats.asked, "answered": stats.answered}


@pytest.mark.parametrize("text", FREE_TEXTS)
def test_frozen_processes_keep_the_mean_of_all_models(fresh_workers: WorkerPool, text: str) -> None:
    found = fresh_workers.run(_frozen, text, 40)
    before, after = (torch.stack([one[when] for one in found]).double() for when in ("before", "after"))
    # Some hundred float32 additions to values up to 4: each errs by 2e-7 at most.
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=5e-6, rtol=0)
    assert sum(one["asked"] for one in found) == sum(one["answered"] for one in found)


def _learns(text: str) -> tuple[list[float], Tensor, list[list[float]], float]:
    learner = _learner(text)
    losses = [learner.step(number) for number in range(60)]
    _, distance = consensus(learner.follower)
    learner.follower.average_()
    gathered = gather(learner.follower, [float(dist.get_rank())])
    learner.follower.close()
    return losses, learner.follower.vector.read(), gathered, distance


@pytest.mark.parametrize("text", ["gossip:rate=0.3", "gossip-every:quantize=bf16"])
def test_processes_learn_and_average(fresh_workers: WorkerPool, text: str) -> None:
    results = fresh_workers.run(_learns, text)
    for losses, model, gathered, distance in results:
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
        assert torch.equal(model, results[0][1])
        assert gathered == [[0.0], [1.0], [2.0], [3.0]] and 0 <= distance < 0.5


def _until_a_peer_dies(text: str) -> dict[str, Any]:
    """Rank 1 dies while it is asking and being asked; the others train on and average what is left."""
    learner = _learner(text)
    if dist.get_rank() == 1:
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
    losses = []
    for number in range(120):
        losses.append(learner.step(number))
        time.sleep(0.005)
    learner.follower.average_()
    stats = learner.follower.stats()
    ranks = gather(learner.follower, [float(dist.get_rank())])
    learner.follower.close()
    return {"losses": losses, "lost": list(stats.lost), "model": learner.follower.vector.read(), "ranks": ranks}


def test_a_killed_peer_is_dropped_and_the_others_finish() -> None:
    pool = WorkerPool(4)
    try:
        for pipe in pool.pipes:
            pipe.send((_until_a_peer_dies, ("scheme:exchange=gossip(mode=wait,patience=0.5)",)))
        found = []
        for rank in (0, 2, 3):
            assert pool.pipes[rank].poll(120), f"rank {rank} hangs after its peer died"
            ok, result = pool.pipes[rank].recv()
            assert ok, result
            found.append(result)
        for result in found:
            assert result["lost"] == [1]
            assert result["ranks"] == [[0.0], [2.0], [3.0]]
            assert torch.equal(result["model"], found[0]["model"])
            assert sum(result["losses"][-5:]) < 0.5 * sum(result["losses"][:5])
    finally:
        pool.close()


def _while_one_stands_still(text: str, who: int) -> dict[str, Any]:
    """This worker's end of a run in which another is stopped, for longer than the others wait, and then goes on."""
    learner = Learner(text, dist.get_rank(), partial(laconic.follow, timeout_s=1.0), 0.1)
    learner.follower.average_()
    if dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for number in range(10):
            learner.step(number)
        learner.follower.average_()
        return {"ranks": gather(learner.follower, [float(dist.get_rank())]), "lost": learner.follower.stats().lost}
    except laconic.LaunchError as error:
        return {"said": str(error)}
    finally:
        learner.follower.close()


@pytest.mark.parametrize("who", [0, 2])
def test_a_peer_that_stands_still_is_dropped_and_told_so(who: int) -> None:
    pool = WorkerPool(3)
    others = [rank for rank in range(3) if rank != who]
    try:
        for pipe in pool.pipes:
            pipe.send((_while_one_stands_still, ("scheme:exchange=gossip(mode=wait,patience=0.2)", who)))
        for rank in others:
            assert pool.pipes[rank].poll(60), f"rank {rank} hangs with its peer"
            ok, found = pool.pipes[rank].recv()
            assert ok and found["ranks"] == [[float(rank)] for rank in others], found
            assert list(found["lost"]) == [who]
        os.kill(pool.processes[who].pid, signal.SIGCONT)
        assert pool.pipes[who].poll(60)
        ok, found = pool.pipes[who].recv()
        assert ok and re.search(f"rank {who} stood still .* resume from a checkpoint", found["said"]), found
    finally:
        os.kill(pool.processes[who].pid, signal.SIGCONT)
        pool.close()
