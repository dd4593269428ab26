"""Checkpoints: new processes, another number of workers, plain tensors."""

from __future__ import annotations

import copy
import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic import Scheme, Session, StateError, parse
from tests.ddp_training import Run, start
from tests.logs import logged
from tests.parts import RECIPE_TEXTS, own_schemes, remembering_schemes
from tests.virtual import gradients, one_step, run
from tests.workers import WorkerPool

# PyTorch's hooks keep their state by bucket number, and DDP numbers its buckets anew after a resume.
OURS = [str(scheme) for scheme in own_schemes() if str(scheme) in RECIPE_TEXTS.values()]


def _snapshot(training: Run) -> dict[str, Any]:
    assert training.session is not None
    return {
        "model": training.ddp.module.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "session": training.session.state_dict(),
    }


def _whole_runs(folder: Path) -> None:
    """Ten steps of every scheme, with a checkpoint after five and one after ten."""
    for number, text in enumerate(OURS):
        training = start(text)
        for step in range(10):
            if step == 5:
                torch.save(_snapshot(training), folder / f"{number}-five-{dist.get_rank()}.pt")
            training.step(step)
        torch.save(_snapshot(training), folder / f"{number}-ten-{dist.get_rank()}.pt")


def _resumed_runs(folder: Path) -> list[str]:
    """The last five steps again from the checkpoint; returns the schemes that ended elsewhere."""
    wrong = []
    for number, text in enumerate(OURS):
        five = torch.load(folder / f"{number}-five-{dist.get_rank()}.pt", weights_only=True)
        training = start(text)
        assert training.session is not None
        training.ddp.module.load_state_dict(five["model"])
        training.optimizer.load_state_dict(five["optimizer"])
        training.session.load_state_dict(five["session"])
        for step in range(5, 10):
            training.step(step)
        ten = torch.load(folder / f"{number}-ten-{dist.get_rank()}.pt", weights_only=True)
        if not _same(_snapshot(training), ten):
            wrong.append(text)
    return wrong


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def test_five_steps_saved_and_five_more_in_new_processes_are_ten(two_workers: WorkerPool, tmp_path: Path) -> None:
    two_workers.run(_whole_runs, tmp_path)
    fresh = WorkerPool(2)
    try:
        assert fresh.run(_resumed_runs, tmp_path) == [[]] * 2
    finally:
        fresh.close()


@cache
def _states(scheme: Scheme, num_workers: int) -> list[dict[str, Any]]:
    """The states of all workers after three steps; nobody changes them."""

    def work(session: Session, rank: int) -> dict[str, Any]:
        for step in range(3):
            one_step(session, gradients(rank, step))
        return session.state_dict()

    return run(scheme, num_workers, work)


def _total(states: list[dict[str, Any]], kind: str) -> Tensor:
    return torch.stack([torch.cat([s["memory"][kind][n] for n in "abcdefg"]) for s in states if s["memory"][kind]]).sum(
        0
    )


@pytest.mark.parametrize("now", [1, 2, 3, 6])
@pytest.mark.parametrize("scheme", remembering_schemes(), ids=str)
def test_another_number_of_workers_keeps_the_sum(scheme: Scheme, now: int) -> None:
    saved = _states(scheme, 4)

    def work(session: Session, rank: int) -> dict[str, Any]:
        session.load_state_dict(saved)
        loaded = session.state_dict()
        one_step(session, gradients(rank, 3))
        return loaded

    with logged(f"4 workers kept now lies with {now}; the sum"):
        loaded = run(scheme, now, work)
    for kind in scheme.memory.kinds:
        # Four float32 terms up to about 100, added in another order.
        torch.testing.assert_close(_total(loaded, kind), _total(saved, kind), atol=1e-4, rtol=0)


def test_states_are_plain_and_checked() -> None:
    scheme = parse("topk:rho=0.05")
    assert isinstance(scheme, Scheme)
    saved = _states(scheme, 2)
    packed = io.BytesIO()
    torch.save(saved[0], packed)
    packed.seek(0)
    assert _same(torch.load(packed, weights_only=True), saved[0])

    def refuse(other: Scheme, num_workers: int, states: Any, expected: str) -> None:
        with pytest.raises(StateError, match=expected):
            run(other, num_workers, lambda session, rank: session.load_state_dict(states))

    refuse(scheme, 3, saved[0], "list of all 2 states")
    refuse(scheme, 2, [saved[0]], "no state of rank 1")
    alone = {**saved[0], "num_living": 1}  # the other had died
    for num_workers in (1, 2, 3):
        with logged():
            run(scheme, num_workers, lambda session, rank: session.load_state_dict([alone]))
    dgc = parse("dgc:rho=0.05")
    assert isinstance(dgc, Scheme)
    refuse(dgc, 2, saved, "resume under the scheme that saved it")
    refuse(scheme, 2, [{**saved[0], "format": 99}, saved[1]], "format is 99")
    refuse(scheme, 2, [{**saved[0], "step": 1}, saved[1]], "different steps")
    without = {name: value for name, value in saved[0].items() if name != "memory"}
    for nothing in (None, [], "state.pt", [None], without, {"step": 3}):
        refuse(scheme, 2, nothing, "this is no state of a session; load what")
    refuse(scheme, 2, [saved[0], saved[0]], "of one rank is given twice")
    with logged("was saved under topk:rho=0.05; topk:rho=0.1 continues"):
        run(parse("topk:rho=0.1"), 2, lambda session, rank: session.load_state_dict(saved))  # type: ignore[arg-type]


def test_a_state_of_another_model_is_refused() -> None:
    scheme = parse("topk:rho=0.05")
    assert isinstance(scheme, Scheme)
    saved = copy.deepcopy(_states(scheme, 1))
    saved[0]["memory"]["residual"]["a"] = torch.zeros(5)

    def work(session: Session, rank: int) -> None:
        session.load_state_dict(saved)
        one_step(session, gradients(rank, 3))

    with pytest.raises(StateError, match="holds 5 entries for 'a', the model 2000"):
        run(scheme, 1, work)
