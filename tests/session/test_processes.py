"""Schemes under DDP over real Gloo processes, always with at least three buckets."""

from __future__ import annotations

import gc
import os
import re
import signal
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic import Scheme, Session, parse
from laconic.quantize import BF16
from laconic.transport import Group, own_group, world
from tests import virtual
from tests.ddp_training import start
from tests.parts import ALL_TEXTS, RECIPE_TEXTS, adds_exactly, talking_schemes
from tests.virtual import LAYOUTS, gradients, one_step
from tests.workers import WorkerPool, equal_everywhere, flat_parameters

MANY = 3  # buckets at least
TRAINED_TEXTS = {  # one of each path: those of other parts take as long and show the same, and are slow tests
    RECIPE_TEXTS[name] for name in ("dense", "bf16", "topk", "dgc", "overlap", "sparse-sign", "maxnorm", "lowrank")
}


def _train(text: str, steps: int) -> dict[str, Any]:
    votes = "sign" in text.partition(":")[0]  # which moves every weight by the rate
    run = start(text, lr=0.005 if votes else 0.05)
    losses = [run.step(number) for number in range(steps)]
    assert run.session is not None
    stats = run.session.stats()
    return {
        "first": losses[0],
        "last": sum(losses[-5:]) / 5,
        "equal": equal_everywhere(flat_parameters(run.ddp)),
        "steps": stats.steps,
        "messages": sum(count.messages for count in stats.by_kind.values()),
        "bytes_out": stats.bytes_out,
        "weights": flat_parameters(run.ddp),
    }


@pytest.mark.parametrize(
    "text",
    [text if text in TRAINED_TEXTS else pytest.param(text, marks=pytest.mark.slow) for text in ALL_TEXTS],
)
def test_every_scheme_trains_over_many_buckets(four_workers: WorkerPool, text: str) -> None:
    draws = "randk" in text  # so what it sends is older: it learns as much, but later
    steps = 80 if draws else 40
    forgets = "topk" in text and "memory=none" in text  # 95 % of every gradient is gone: it learns, but slowly
    hesitates = any(word in text for word in ("overlap", "down_rho", "quantize=sign"))  # more waits, for longer
    results = four_workers.run(_train, text, steps)
    for result in results:
        assert result["steps"] == steps
        assert result["last"] < (0.97 if forgets else 0.93 if hesitates else 0.8) * result["first"]
        assert result["equal"] == (text != "silent")
        if text == "silent":
            assert result["bytes_out"] == 0
        elif "powersgd" not in text:  # which aborts over Gloo with more than one bucket
            assert result["messages"] >= MANY * steps


@pytest.mark.slow  # after 40 steps the test above sees it too
@pytest.mark.parametrize("text", [t for t in RECIPE_TEXTS.values() if "maxnorm" in t or "multiscale" in t])
def test_integers_keep_replicas_equal_for_100_steps(four_workers: WorkerPool, text: str) -> None:
    assert all(result["equal"] for result in four_workers.run(_train, text, 100))


def _weights_after(text: str | None, steps: int, views: bool = False) -> Tensor:
    run = start(text, gradient_as_bucket_view=views)
    for number in range(steps):
        run.step(number)
    return flat_parameters(run.ddp)


def test_dense_is_ddp_bit_for_bit(four_workers: WorkerPool) -> None:
    three = WorkerPool(3)  # no power of two: here it shows whether we divide as DDP does
    try:
        for pool in (four_workers, three):
            plain, ours = pool.run(_weights_after, None, 10), pool.run(_weights_after, "dense", 10)
            assert torch.equal(plain[0], ours[0])
    finally:
        three.close()


@pytest.mark.parametrize("text", ["dense", "topk:rho=0.05,exchange=server"])
def test_gradients_may_be_views_of_buckets(four_workers: WorkerPool, text: str) -> None:
    copies, views = (four_workers.run(_weights_after, text, 5, views) for views in (False, True))
    assert torch.equal(copies[0], views[0])


@cache
def _own_world() -> dist.ProcessGroup:
    """One of all, for all schemes."""
    return own_group(world(), torch.device("cpu"))


def _steps_over_gloo(text: str, steps: int) -> list[dict[str, Tensor]]:
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    session = Session(scheme, Group(_own_world(), torch.device("cpu")))
    return [one_step(session, gradients(dist.get_rank(), step)) for step in range(steps)]


@pytest.mark.parametrize("scheme", talking_schemes(), ids=str)
def test_processes_and_virtual_workers_give_the_same_numbers(four_workers: WorkerPool, scheme: Scheme) -> None:
    assert len(LAYOUTS) >= MANY
    steps = 4  # one after the longest warm-up
    over_gloo = four_workers.run(_steps_over_gloo, str(scheme), steps)
    in_process = virtual.run(scheme, 4, lambda s, rank: [one_step(s, gradients(rank, step)) for step in range(steps)])
    for want, got in zip(in_process[0], over_gloo[0], strict=True):
        for name in want:
            floats_added = scheme.exchange.adds_in_flight or scheme.trigger.density(0, 0.01) == 1
            if floats_added and not adds_exactly(scheme):
                # A ring adds in another order: some ulp of values up to 60, in the type of the sum; bases of one step
                # that were made of such sums multiply those of the next.
                ulp = 0.5 if isinstance(scheme.quantize, BF16) else 1e-2 if scheme.select.factors else 1e-4
                torch.testing.assert_close(got[name], want[name], atol=ulp, rtol=0)
            else:
                assert torch.equal(got[name], want[name])


def _soak(text: str, steps: int) -> tuple[bool, bool]:
    """Train while this thread runs collectives of its own between and during the steps."""
    run = start(text)
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    right = True
    for number in range(steps):
        pending = torch.full((100,), float(rank + number))
        work = dist.all_reduce(pending, async_op=True)
        run.step(number)
        assert work is not None
        work.wait()
        right &= bool((pending == num_workers * number + sum(range(num_workers))).all())
        mine = torch.tensor([rank, number])
        gathered = [torch.empty_like(mine) for _ in range(num_workers)]
        dist.all_gather(gathered, mine)
        right &= [int(g[0]) for g in gathered] == list(range(num_workers))
    return right, equal_everywhere(flat_parameters(run.ddp))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["topk:rho=0.05,per=parameter,warmup=50", "dense"])
def test_200_steps_beside_the_users_own_collectives(four_workers: WorkerPool, text: str) -> None:
    assert four_workers.run(_soak, text, 200) == [(True, True)] * 4


def _dropped() -> list[str]:
    """What Python says of connections of a network that nobody closes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network = Group(own_group(world(), torch.device("cpu")), torch.device("cpu"))
        network.all_reduce_(torch.ones(3), "values")
        del network
        gc.collect()
    return [str(each.message) for each in caught]


def test_a_network_that_nobody_closes_hangs_up(four_workers: WorkerPool) -> None:
    assert four_workers.run(_dropped) == [[]] * 4


def _until_a_peer_dies(text: str) -> str:
    run = start(text, broadcast_buffers=False)  # DDP's own broadcast would be first to see it, and is not ours
    for number in range(1000):
        if number == 5 and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            run.step(number)
        except laconic.PeerError as error:
            return str(error)
    return "nobody noticed"


@pytest.mark.parametrize("text", ["topk:rho=0.05", "topk:rho=0.05,exchange=server"])
def test_a_killed_worker_is_an_error_on_the_others(text: str) -> None:
    """On those who wait for it, and when these end, as they do, on those who wait for them."""
    pool = WorkerPool(4)
    try:
        for pipe in pool.pipes:
            pipe.send((_until_a_peer_dies, (text,)))
        waiting = dict(zip(pool.pipes[:3], pool.processes, strict=False))
        while waiting:
            told = [pipe for pipe in wait(list(waiting), timeout=300) if isinstance(pipe, Connection)]
            assert told, "a worker hangs after its peer died"
            for pipe in told:
                ok, said = pipe.recv()
                assert ok and said != "nobody noticed", said
                waiting.pop(pipe).terminate()
    finally:
        pool.close()


def _beside_one_that_hangs(text: str) -> str:
    if text.startswith("local"):
        model = torch.nn.Linear(30, 40)
        follower = laconic.follow(model, torch.optim.SGD(model.parameters(), lr=0.1), text, timeout_s=1.0)
        step: Callable[[int], object] = lambda number: follower.step()  # noqa: E731
    else:
        step = start(text, timeout_s=1.0, broadcast_buffers=False).step
    for number in range(4):
        if number == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            step(number)
        except laconic.PeerError as error:
            return str(error)
    return "nobody noticed"


@pytest.mark.parametrize("text", ["dense", "local:every=1", pytest.param("topk:rho=0.05", marks=pytest.mark.slow)])
def test_a_stopped_worker_costs_the_timeout_that_was_given(text: str) -> None:
    pool = WorkerPool(2)
    try:
        for pipe in pool.pipes:
            pipe.send((_beside_one_that_hangs, (text,)))
        assert pool.pipes[0].poll(60), "a worker waits for one that is stopped"
        ok, said = pool.pipes[0].recv()
        assert ok and re.search("cannot go on: .* has sent nothing|rank 1 has sent nothing for 1 s", said), said
    finally:
        os.kill(pool.processes[1].pid, signal.SIGCONT)
        pool.close()
