"""One rule for Inf and NaN, on every path: what is undone, and who keeps what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import LaconicError, Scheme, Session, parse
from laconic.exchange import InProcess, in_process
from tests.logs import logged
from tests.parts import remembering_schemes, talking_schemes
from tests.virtual import LAYOUTS, gradients, one_core, one_step, run

M = 3
BAD_RANK = 1
BUCKETS = {"first": LAYOUTS[0], "last": LAYOUTS[-1]}
STEPS = {"warm-up": 0, "later": 4}
CASES = [
    pytest.param(scheme, when, id=f"{scheme}-{when}")
    for scheme in remembering_schemes()
    for when in STEPS
    if when == "later" or scheme.trigger.density(0, 0.5) >= 1  # some go dense at first
]


def _spoilt(given: dict[str, Tensor], bucket: str, rank: int) -> dict[str, Tensor]:
    if rank == BAD_RANK:
        given[BUCKETS[bucket].names[-1]][0] = torch.inf
    return given


def _flat(state: object) -> object:
    if isinstance(state, dict):
        return {key: _flat(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


@pytest.mark.parametrize(("scheme", "when"), CASES)
def test_without_a_grad_scaler_who_is_finite_keeps_its_gradient(scheme: Scheme, when: str) -> None:
    def spoil(session: Session, rank: int, step: int, bucket: str) -> None:
        before: dict[str, Any] = session.state_dict()["memory"]
        given = _spoilt(gradients(rank, step), bucket, rank)
        out = one_step(session, given)
        after = session.state_dict()["memory"]
        for name in BUCKETS[bucket].names:
            assert bool(out[name].isnan().all())
            kept = before["residual"].get(name, torch.zeros_like(given[name]))
            if rank != BAD_RANK:
                velocity = before.get("velocity", {}).get(name, torch.zeros_like(kept))
                kept = scheme.memory.fade * kept + scheme.memory.momentum * velocity + given[name]
            torch.testing.assert_close(after["residual"][name], kept, atol=1e-5, rtol=1e-6)  # two roundings at about 60
        others = [name for name in out if name not in BUCKETS[bucket].names]
        assert all(bool(out[name].isfinite().all()) for name in others)

    def work(session: Session, rank: int) -> None:
        for step in range(STEPS[when]):
            one_step(session, gradients(rank, step))
        for number, bucket in enumerate(BUCKETS):
            spoil(session, rank, STEPS[when] + number, bucket)
            assert session.stats().skipped_steps == number + 1
        assert all(bool(each.isfinite().all()) for each in one_step(session, gradients(rank, 9)).values())

    run(scheme, M, work)


@pytest.mark.parametrize(("scheme", "when"), CASES)
def test_with_a_grad_scaler_the_step_is_undone_bit_for_bit(scheme: Scheme, when: str) -> None:
    def work(transport: InProcess) -> None:
        session = Session(scheme, transport, loss_scale=lambda: 8.0)

        def scaled(step: int) -> dict[str, Tensor]:
            return {name: 8 * each for name, each in gradients(transport.rank, step).items()}

        for step in range(STEPS[when] + 1):  # after one step everything that is kept is there
            one_step(session, scaled(step))
        before = session.state_dict()
        for number, bucket in enumerate(BUCKETS, 1):
            one_step(session, _spoilt(scaled(STEPS[when] + number), bucket, transport.rank))
            after = session.state_dict()
            for kept in ("memory", "past"):
                assert _flat(after[kept]) == _flat(before[kept]), kept
            assert _flat(after["owner"].get("held")) == _flat(before["owner"].get("held"))
            assert after["skipped_steps"] == before["skipped_steps"] + number

    with one_core():
        in_process(M, work)


@pytest.mark.parametrize("scheme", [s for s in talking_schemes() if not s.memory.kinds], ids=str)
def test_where_nothing_is_kept_all_workers_see_it_and_go_on(scheme: Scheme) -> None:
    def work(session: Session, rank: int) -> None:
        out = one_step(session, _spoilt(gradients(rank, 0), "last", rank))
        assert not bool(out[LAYOUTS[-1].names[-1]].isfinite().all())
        assert all(bool(each.isfinite().all()) for each in one_step(session, gradients(rank, 1)).values())

    run(scheme, M, work)


FP16_SUM = parse("scheme:select=everything,quantize=fp16,memory=residual,exchange=all-reduce")


@pytest.mark.parametrize("scheme", [*remembering_schemes(), FP16_SUM], ids=str)
def test_numbers_that_float32_can_hold_but_not_add_up_leave_no_trace(scheme: Scheme) -> None:
    def work(session: Session, rank: int) -> None:
        for step in range(6):
            given = gradients(rank, step)
            if step in (2, 3):
                given["c"][::2] = 3e38 if rank == BAD_RANK else 0.0
            one_step(session, given)
        assert session.stats().skipped_steps == 2
        _assert_finite(session)
        for step in range(6, 10):
            for each in given.values():
                each.fill_(1e18 if step < 8 else 0.0)
            out = one_step(session, given)
            assert all(bool(each.isfinite().all()) for each in out.values())
        assert session.stats().skipped_steps == 2
        _assert_finite(session)

    run(scheme, M, work)


def _assert_finite(session: Session) -> None:
    state = session.state_dict()
    for kind in (*state["memory"].values(), *state["past"].values(), state["owner"].get("held", {})):
        assert all(bool(each.isfinite().all()) for each in kind.values())


@pytest.mark.parametrize("scheme", talking_schemes(), ids=str)
def test_a_bucket_that_is_not_finite_becomes_zero_if_that_is_asked_for(scheme: Scheme) -> None:
    def work(transport: InProcess) -> None:
        session = Session(scheme, transport, zeroes=True)
        told = [session.last_step_finite]
        out = one_step(session, _spoilt(gradients(transport.rank, 0), "last", transport.rank))
        assert not any(bool(out[name].any()) for name in LAYOUTS[-1].names)
        assert all(bool(each.isfinite().all()) for each in out.values())
        told.append(session.last_step_finite)
        one_step(session, gradients(transport.rank, 1))
        told.append(session.last_step_finite)
        assert told == [True, False, True] and session.stats().skipped_steps == 1

    with one_core():
        in_process(M, work)


@pytest.mark.parametrize("text", ["dense", "topk:rho=0.05"])
def test_whether_the_last_step_was_finite_is_told_on_all_workers(text: str) -> None:
    def work(session: Session, rank: int) -> None:
        for step in range(4):
            given = gradients(rank, step)
            one_step(session, _spoilt(given, "first", rank) if step % 2 else given)
            assert session.last_step_finite == (step % 2 == 0)

    run(parse(text), M, work)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["dense", "topk:rho=0.05"])
def test_ten_zeroed_steps_in_a_row_are_an_error(text: str) -> None:
    def work(transport: InProcess) -> None:
        session = Session(parse(text), transport, zeroes=True)  # type: ignore[arg-type]
        for step in [*range(9), 10, *range(9)]:
            given = gradients(transport.rank, step)
            one_step(session, given if step == 10 else _spoilt(given, "last", transport.rank))
        with pytest.raises(LaconicError, match="10 steps in a row gave Inf or NaN and were zeroed; go back to a check"):
            one_step(session, _spoilt(given, "last", transport.rank))

    with one_core():
        in_process(M, work)


@pytest.mark.parametrize(("loss_scale", "num_told"), [(None, 1), (lambda: 1.0, 0)], ids=["bare", "under a GradScaler"])
def test_ten_steps_in_a_row_that_are_not_finite_are_told_once_by_rank_0(loss_scale: Any, num_told: int) -> None:
    def work(transport: InProcess) -> None:
        session = Session(parse("topk:rho=0.05"), transport, loss_scale=loss_scale)  # type: ignore[arg-type]
        for step in [*range(9), 10, *range(12)]:
            given = gradients(transport.rank, step)
            one_step(session, given if step == 10 else _spoilt(given, "last", transport.rank))

    with logged() as told, one_core():
        in_process(M, work)
    expected = ["a step gave Inf or NaN and is skipped; if a GradScaler", "10 steps in a row gave Inf or NaN:"]
    assert len(told) == len(expected) * num_told
    assert all(line.startswith(begin) for line, begin in zip(told, expected * num_told, strict=True))
