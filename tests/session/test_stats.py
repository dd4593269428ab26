"""What a session tells of itself: numbers of the last step, totals, and that neither contradicts the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic import Scheme, Session, parse
from laconic.adapters import hook
from laconic.paths.frames import Gathering
from laconic.session import Stats
from laconic.transport import InProcess, in_process
from tests.ddp_training import start
from tests.gossiping import Learner, followed
from tests.virtual import gradients, one_core, one_step, run
from tests.workers import WorkerPool

M = 4
PHASES = {"select_ms", "encode_ms", "exchange_ms", "decode_ms"}
SPARSE = "topk:rho=0.05"
GOSSIP = "gossip:rate=0.5,quantize=bf16,mode=matched,seed=4"


def scheme_of(text: str) -> Scheme:
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    return scheme


@pytest.mark.parametrize("text", [SPARSE, "overlap:rho=0.05", "lowrank:rank=1", "maxnorm:bits=4", "bf16"])
def test_the_steps_add_up_to_the_totals(text: str) -> None:
    def work(session: Session, rank: int) -> None:
        steps = []
        for number in range(4):
            one_step(session, gradients(rank, number))
            steps.append(session.metrics())
        stats = session.stats()
        for name in ("bytes_out", "bytes_in"):
            assert sum(step[name] for step in steps) == getattr(stats, name) > 0
        for phase, seconds in stats.seconds.items():
            assert sum(step[f"{phase}_ms"] for step in steps) == pytest.approx(1e3 * seconds)
        dense = stats.dense_bytes_out / 4
        assert all(step["ratio"] == pytest.approx(dense / step["bytes_out"]) for step in steps)
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        assert all(step["members"] == M and step["skipped"] == 0 for step in steps)
        assert all(("union" in step) == (stats.union is not None) for step in steps)
        assert all(isinstance(value, float | int) for step in steps for value in step.values())

    run(scheme_of(text), M, work)


def test_a_step_that_was_skipped_is_told_of_that_step_alone() -> None:
    def work(session: Session, rank: int) -> None:
        skipped = []
        for number in range(3):
            given = gradients(rank, number)
            if number == 1 and rank == 0:
                given["a"][0] = torch.nan
            one_step(session, given)
            skipped.append(session.metrics()["skipped"])
        assert skipped == [0, 1, 0]

    run(scheme_of(SPARSE), M, work)


def test_nothing_is_asked_of_a_device_until_someone_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> dict[str, Any]:
        raise AssertionError("this takes a look at tensors")

    def work(session: Session, rank: int) -> None:
        monkeypatch.setattr(Gathering, "figures", refuse)
        one_step(session, gradients(rank, 0))
        session.metrics()

    run(scheme_of(SPARSE), M, work)


def test_servers_cannot_take_a_step_back() -> None:
    def work(transport: InProcess) -> None:
        transport.has_servers = True  # type: ignore[misc]
        with pytest.raises(laconic.SchemeError, match="servers cannot take a step back; leave unused_steps out, or"):
            Session(scheme_of("overlap:rho=0.05"), transport, discards=True)

    in_process(1, work)


def _per_step(stats: Stats) -> float:
    return stats.bytes_out / stats.steps_here


def test_bytes_are_of_the_steps_they_are_divided_by() -> None:
    """Also in a session that loads another's state in mid-run, and in one that takes a step back."""

    def work(transport: InProcess) -> None:
        session = Session(scheme_of(SPARSE), transport, discards=True)
        for number in range(4):
            one_step(session, gradients(transport.rank, number))
        usual, saved = _per_step(session.stats()), session.state_dict()
        session.discard_if_(True)
        assert session.stats().steps == 3 and _per_step(session.stats()) == usual
        one_step(session, gradients(transport.rank, 3))
        session.load_state_dict({**saved, "step": 90})
        assert session.stats().steps == 90 and _per_step(session.stats()) == usual

    with one_core():
        in_process(M, work)


def test_a_session_that_takes_over_from_another_counts_on() -> None:
    def work(transport: InProcess) -> None:
        plain, sparse = (Session(scheme_of(text), transport) for text in ("bf16", SPARSE))
        for number in range(3):
            one_step(plain, gradients(transport.rank, number))
        before = plain.stats()
        sparse.count_on_from(plain)
        for number in range(3, 5):
            one_step(sparse, gradients(transport.rank, number))
        after = sparse.stats()
        assert after.steps == 2 and after.steps_here == 5
        assert after.dense_bytes_out == pytest.approx(before.dense_bytes_out / 3 * 5)
        assert all(after.seconds[phase] >= seconds for phase, seconds in before.seconds.items())
        assert sparse.metrics()["bytes_out"] == (after.bytes_out - before.bytes_out) / 2

    with one_core():
        in_process(M, work)


@pytest.mark.parametrize("text", ["streaming:every=4,fragments=2,delay=1", "diloco:every=2", GOSSIP])
def test_a_follower_never_waits_longer_than_it_took(text: str) -> None:
    def work(transport: InProcess) -> None:
        learner = Learner(text, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        follower = learner.follower
        steps = []
        for number in range(8):
            learner.drift(number)
            steps.append(follower.metrics())
        follower.settle()
        follower.average_()
        stats = follower.stats()
        assert (stats.waited_s or 0.0) <= stats.seconds["exchange"]
        assert all(step.get("waited_ms", 0.0) <= step["training_ms"] for step in steps)
        assert 0 < sum(step["bytes_out"] for step in steps) <= stats.bytes_out
        assert sum(step["rounds"] for step in steps) > 0
        assert steps[-1]["step"] == 8 and steps[-1]["members"] == M
        assert repr(follower) == f"<Follower {text}: {M} workers, 8 steps>"

    with one_core():
        in_process(M, work)


def _watched(text: str) -> dict[str, Any]:
    """A session over DDP, after three steps."""
    run = start(text, bucket_mb=100)
    assert run.session is not None
    for number in range(3):
        run.step(number)
    with_norms = run.session.metrics(norms=True)
    run.optimizer.zero_grad()
    return {
        "metrics": run.session.metrics(),
        "with norms": with_norms,
        "cleared": [*run.session.metrics(norms=True)],
        "stats": run.session.stats(),
        "repr": repr(run.session),
    }


@pytest.mark.parametrize("text", [SPARSE, "bf16", "torch-powersgd:start=2"])
def test_ddp_tells_what_its_backward_pass_waited_for(four_workers: WorkerPool, text: str) -> None:
    for watched in four_workers.run(_watched, text):
        metrics, stats = watched["metrics"], watched["stats"]
        assert metrics["step"] == stats.steps == 3 and metrics["bytes_out"] < stats.bytes_out
        assert f"{text}: 4 workers, 3 steps>" in watched["repr"]
        assert metrics["ratio"] > 0 and metrics["members"] == 4 and metrics["exchange_ms"] > 0
        if "torch" not in text:
            assert metrics.keys() >= {*PHASES, "waited_ms", "skipped"} and metrics["waited_ms"] > 0
            residual = watched["with norms"]["residual"]
            assert "residual" not in watched["cleared"] and (residual > 0) == (text == SPARSE)


def test_a_hook_that_was_not_called_yet_can_be_printed() -> None:
    state, _ = hook(SPARSE, nn.Linear(2, 2))
    assert repr(state) == f"<HookSession {SPARSE}: not begun>"
    with pytest.raises(laconic.StateError, match="ask after the first backward pass"):
        state.metrics()
