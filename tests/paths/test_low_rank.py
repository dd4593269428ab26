"""Low rank: what it sends is the projection it says, on every worker, whatever a matrix is like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic import Session, kernels
from laconic.layout import Layout
from laconic.transport import InProcess, in_process
from tests import golden
from tests.logs import logged
from tests.parts import made, own_schemes
from tests.virtual import LAYOUTS, gradients, layout_of, one_core, one_step, pipelined_step, run

BOTH = "lowrank:rank=2"
ALTERNATING = "lowrank:rank=2,form=alternating"
FORMS = pytest.mark.parametrize("text", [BOTH, ALTERNATING])
TEXTS = [str(scheme) for scheme in own_schemes() if scheme.select.factors]


def _alone(text: str, given: Sequence[Mapping[str, Tensor]], layouts: tuple[Layout, ...]) -> list[dict[str, Tensor]]:
    """What steps of a single worker come to."""
    (outs,) = run(made(text), 1, lambda session, _: [one_step(session, each, layouts) for each in given])
    return outs


def _matrix(rows: int, cols: int, rank: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=draw) @ torch.randn(rank, cols, generator=draw)


@FORMS
@pytest.mark.parametrize("num_zeros", [0, 2])
def test_a_matrix_of_that_rank_has_arrived_whole_after_two_steps(text: str, num_zeros: int) -> None:
    """Its columns were found in the first; also after steps in which there was nothing to find."""
    layout = (Layout.of(["m"], [(60, 40)]),)
    m = _matrix(60, 40, 2, seed=1).reshape(-1)
    outs = _alone(text, [{"m": torch.zeros(2400)}] * num_zeros + [{"m": m}] * 4, layout)
    assert not any(bool(out["m"].any()) for out in outs[:num_zeros])
    for last in (2, 4):
        arrived = torch.stack([out["m"] for out in outs[: num_zeros + last]]).sum(0)
        torch.testing.assert_close(arrived, last * m, atol=1e-4, rtol=0)  # some ulp of about 20


def test_what_is_applied_is_the_projection_on_p() -> None:
    """M' = P P^T M for an orthonormal P, so it has the rank, and what is kept is at right angles to it."""
    layout = (Layout.of(["m"], [(60, 5, 8)]),)
    m = _matrix(60, 40, 40, seed=2)

    def work(session: Session, rank: int) -> tuple[Tensor, Tensor]:
        out = one_step(session, {"m": m.reshape(-1)}, layout)["m"].view(60, 40).clone()
        return out, session.state_dict()["memory"]["residual"]["m"].view(60, 40)

    ((sent, kept),) = run(made(BOTH), 1, work)
    assert int(torch.linalg.matrix_rank(sent)) == 2
    torch.testing.assert_close(sent.T @ kept, torch.zeros(40, 40), atol=1e-3, rtol=0)  # of products of about 100
    torch.testing.assert_close(sent + kept, m)


@FORMS
def test_equal_matrices_are_multiplied_together_with_the_numbers_of_each_alone(text: str) -> None:
    """At even distances and at uneven ones; a parameter's numbers are its own, whichever bucket it is in."""
    matrices = {name: (40, 30) for name in "abcde"} | {"z": (30, 40)}
    shapes: dict[str, tuple[int, ...]] = {**matrices, "x": (7,), "y": (9,)}
    ones = {"x": torch.ones(7), "y": torch.ones(9)}
    given = [
        ones | {name: _matrix(*shape, rank=9, seed=step).reshape(-1) for name, shape in matrices.items()}
        for step in range(3)
    ]

    def cut(*names: str) -> tuple[Layout, ...]:
        return tuple(Layout.of(list(each), [shapes[name] for name in each]) for each in names)

    together = _alone(text, given, cut("abxcydze"))
    apart = _alone(text, given, cut(*"abcdexyz"))
    for one, other in zip(together, apart, strict=True):
        for name in shapes:
            torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=0)  # float32 products of about 30


@FORMS
def test_nothing_is_lost_over_workers_of_which_one_is_idle(text: str) -> None:
    """Deposits = applied * M + balances, where all that is rounded in flight is float32."""
    layout = (layout_of("abe"),)

    def work(transport: InProcess) -> tuple[Tensor, Tensor, Tensor]:
        session = Session(made(text), transport, holds_idle=True)
        given = torch.zeros(2000)
        applied = torch.zeros(2000)
        for step in range(6):
            fresh = gradients(transport.rank, step, layout)
            if transport.rank == 1 and step % 3 == 2:
                fresh["a"].zero_()
            given += fresh["a"]
            applied += one_step(session, fresh, layout)["a"]
        return given, applied, session.state_dict()["memory"]["residual"]["a"]

    found = in_process(2, work)
    given, kept = found[0][0] + found[1][0], found[0][2] + found[1][2]
    torch.testing.assert_close(2 * found[0][1] + kept, given, atol=2e-4, rtol=0)  # some ulp of about 60
    assert torch.equal(found[0][1], found[1][1])


def test_bases_are_orthonormal_and_never_nan() -> None:
    draw = torch.Generator().manual_seed(4)
    full = torch.randn(3, 50, 4, generator=draw)
    full[1] *= 1e30  # whose squares float32 does not hold
    full[2] *= 1e-30
    dependent = torch.randn(20, 1, generator=draw).expand(20, 4).clone()
    dependent[:, 3] = 0
    bases = torch.cat([torch.zeros(600), torch.eye(20)[:, :4].flatten()])
    places = torch.tensor([[0, 0, 50], [200, 200, 50], [400, 400, 50], [600, 600, 20]])
    kernels.orthonormal_(bases, torch.cat([full.flatten(), dependent.flatten()]), places, 4)
    good, short = bases[:600].view(3, 50, 4), bases[600:].view(20, 4)
    torch.testing.assert_close(good.mT @ good, torch.eye(4).expand(3, 4, 4), atol=1e-6, rtol=0)
    assert bool(short.isfinite().all())
    assert float(torch.linalg.matrix_norm(short, 2)) <= 1 + 1e-6  # within a projection
    assert float(short[:, 3].norm()) == pytest.approx(1, abs=1e-3)  # zeros left the basis that was there


def test_bases_are_the_same_on_all_workers_and_go_with_the_name() -> None:
    """Drawn, or after steps; and loaded by another number of workers with other buckets."""

    def work(session: Session, rank: int) -> dict[str, Any]:
        for step in range(3):
            one_step(session, gradients(rank, step))
        return session.state_dict()

    saved = run(made(BOTH), 4, work)
    bases = saved[0]["past"]["bases"]
    assert set(bases) == {"a", "c"} and bases["a"].shape == (2 * 90,)
    assert all(torch.equal(bases[name], other["past"]["bases"][name]) for other in saved for name in bases)

    def resumed(session: Session, rank: int) -> dict[str, Any]:
        session.load_state_dict(saved)
        loaded = session.state_dict()["past"]["bases"]
        for step in (3, 4):
            one_step(session, gradients(rank, step), (layout_of("ebca"), layout_of("gfd")))
        return {"loaded": loaded, "after": session.state_dict()["past"]["bases"]}

    with logged("4 workers kept now lies with 3"):
        found = run(made(BOTH), 3, resumed)
    for each in found:
        assert all(torch.equal(each["loaded"][name], bases[name]) for name in bases)
        assert all(torch.equal(each["after"][name], found[0]["after"][name]) for name in bases)
        assert not torch.equal(each["after"]["a"], bases["a"])


@FORMS
def test_bf16_gradients_are_added_as_such(text: str) -> None:
    def work(session: Session, rank: int) -> list[dict[str, Tensor]]:
        given = [{name: each.bfloat16() for name, each in gradients(rank, step).items()} for step in range(4)]
        outs = [one_step(session, each) for each in given]
        assert session.stats().by_kind["factors"].payload_bytes % 2 == 0
        return outs

    first, second = run(made(text), 2, work)
    for mine, theirs in zip(first, second, strict=True):
        assert all(each.dtype == torch.bfloat16 and bool(each.isfinite().all()) for each in mine.values())
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_bucket_without_matrices_takes_one_message() -> None:
    def work(session: Session, rank: int) -> None:
        one_step(session, gradients(rank, 0))
        assert session.stats().by_kind["factors"].messages == 2 + 2 + 1

    assert len(LAYOUTS) == 3
    run(made(BOTH), 2, work)


@pytest.mark.parametrize("text", TEXTS)
def test_the_pipeline_changes_no_bit(text: str) -> None:
    """In the golden samples a processor's order of sums may show; on one machine nothing does."""
    assert golden.trajectory(text, "overflow", pipelined_step) == golden.trajectory(text, "overflow")


@FORMS
def test_fifty_steps_after_an_overflow_all_is_finite_and_the_scale_is_back(text: str) -> None:
    """Under a GradScaler, with one worker's gradient Inf at step 5."""
    layout = Layout.of(["weight", "bias"], [(40, 30), (40,)])
    target = _matrix(40, 30, 30, seed=5) / 30

    def work(transport: InProcess) -> tuple[list[float], list[float], Tensor]:
        model = nn.Linear(30, 40)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10)
        session = Session(made(text), transport, loss_scale=scaler.get_scale)
        draw = torch.Generator().manual_seed(transport.rank)
        losses, scales = [], []
        for step in range(56):
            x = torch.randn(16, 30, generator=draw)
            loss = (model(x) - x @ target.T).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            given = {name: p.grad.reshape(-1) for name, p in model.named_parameters() if p.grad is not None}
            if step == 5 and transport.rank == 1:
                given["weight"][7] = torch.inf
            out = one_step(session, given, (layout,))
            for name, parameter in model.named_parameters():
                parameter.grad = out[name].view_as(parameter).clone()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
            scales.append(scaler.get_scale())
        assert session.stats().skipped_steps == 1
        assert all(bool(each.isfinite().all()) for each in session.state_dict()["past"]["bases"].values())
        return losses, scales, torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    with one_core():
        found = in_process(3, work)
    for losses, scales, weights in found:
        assert scales[4] == 2.0**12 and scales[5] == 2.0**11 and max(scales[6:]) >= 2.0**12
        assert bool(weights.isfinite().all()) and torch.equal(weights, found[0][2])
        assert sum(losses[-5:]) < 0.2 * sum(losses[:5])
