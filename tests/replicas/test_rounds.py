"""Outer steps: what a round does to models and anchor, late results, state, and what users do to a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic import (
    Follower,
    GossipScheme,
    LaconicError,
    OuterScheme,
    PeerError,
    Scheme,
    SchemeError,
    StateError,
    attach,
    follow,
    parse,
)
from laconic.exchange import Pairs, matching
from laconic.layout import Layout
from laconic.optim import Muon
from laconic.outer import Agreement, OuterMomentum
from laconic.paths import bytes_out
from laconic.replicas import OuterRounds, consensus, inner_momentum, policy_for
from laconic.session import OnMismatch
from laconic.transport import InProcess, in_process
from laconic.transport.virtual import _Meeting
from laconic.trigger import Rounds
from tests.gossiping import Learner, Small, drifted, followed, matched
from tests.logs import logged
from tests.parts import outer_texts
from tests.virtual import one_core

M = 4
EXACT = "local:every=3,quantize=none"


def outer(text: str) -> OuterScheme:
    scheme = parse(text)
    assert isinstance(scheme, OuterScheme)
    return scheme


def wander(model: nn.Module, rank: int, number: int) -> None:
    """A step in a random direction, other for each worker."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.01)


def walk(
    text: str,
    steps: int,
    *,
    make: Callable[[], nn.Module] = Small,
    num_workers: int = M,
    before_step: Callable[[nn.Module, int, int], None] = wander,
    **options: Any,
) -> list[tuple[nn.Module, Follower, list[Tensor]]]:
    """(model, follower, the model after each step) of virtual workers whose models wander."""
    torch.manual_seed(3)
    first = make()

    def work(transport: InProcess) -> tuple[nn.Module, Follower, list[Tensor]]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if [*model.parameters()] else None
        follower = Follower(OuterRounds(model, optimizer, outer(text), transport, in_background=False, **options))  # type: ignore[arg-type]
        seen = []
        for number in range(steps):
            before_step(model, transport.rank, number)
            follower.step()
            seen.append(follower.vector.read())
        return model, follower, seen

    with one_core():
        return in_process(num_workers, work)


def trained(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


def test_a_round_gives_every_model_the_mean_of_all() -> None:
    everyone = walk(EXACT, 3)
    alone = walk("local:every=4,quantize=none", 3)  # no round yet
    mean = torch.stack([trained(model) for model, _, _ in alone]).mean(0)
    models = [trained(model) for model, _, _ in everyone]
    assert all(torch.equal(model, models[0]) for model in models)
    assert torch.allclose(models[0], mean, atol=1e-6)
    assert not torch.equal(trained(alone[0][0]), trained(alone[1][0]))


def test_the_anchor_takes_a_step_of_nesterov() -> None:
    """Against torch's own, on the mean of what all drifted."""
    torch.manual_seed(3)
    reference = nn.Parameter(trained(Small()))
    optimizer = torch.optim.SGD([reference], lr=0.5, momentum=0.8, nesterov=True)
    everyone = walk("diloco:every=1,lr=0.5,momentum=0.8,quantize=none", 4)
    before = reference.detach().clone()
    for number in range(4):
        models = []
        for rank in range(M):
            torch.manual_seed(3)
            model = Small()
            nn.utils.vector_to_parameters(before.clone(), model.parameters())
            wander(model, rank, number)
            models.append(trained(model))
        reference.grad = before - torch.stack(models).mean(0)
        optimizer.step()
        before = reference.detach().clone()
        assert torch.allclose(everyone[0][2][number][: before.numel()], before, atol=1e-5)


@pytest.mark.parametrize(("mix", "kept"), [(None, 1.0), (0.0, 0.0), (0.25, 0.25)])
def test_a_late_result_keeps_what_was_learned_meanwhile(mix: float | None, kept: float) -> None:
    """x = anchor + (x - x as sent), or mix*x + (1-mix)*anchor."""
    given = "" if mix is None else f",mix={mix}"
    text = f"scheme:trigger=rounds(every=2,delay=1{given}),outer=sgd"
    count = trained(Small()).numel()
    everyone = walk(text, 3)
    alone = walk("local:every=9,quantize=none", 3)
    sent = torch.stack([seen[1][:count] for _, _, seen in alone])
    anchor = sent.mean(0)
    for rank, (_, _, seen) in enumerate(everyone):
        now = alone[rank][2][2][:count]
        expected = anchor + now - sent[rank] if mix is None else kept * now + (1 - kept) * anchor
        assert torch.allclose(seen[2][:count], expected, atol=1e-6)
        assert torch.equal(seen[1][:count], sent[rank])  # nothing has come yet


def test_fragments_take_turns() -> None:
    scheme = outer("streaming:every=4,fragments=2,delay=1")
    assert [list(scheme.when.fragments_due(step)) for step in range(1, 9)] == [[], [0], [], [1], [], [0], [], [1]]
    warmed = outer("streaming:every=4,fragments=2,delay=1,warmup=1").when
    assert list(warmed.fragments_due(1)) == [0, 1] and warmed.delay_at(1) == 0 and warmed.delay_at(3) == 1
    everyone = walk("streaming:every=2,fragments=2,delay=0", 1)
    body, head = (torch.stack([p(model).detach() for model, _, _ in everyone]) for p in (_body, _head))
    assert bool((body == body[0]).all()) and not bool((head == head[0]).all())
    assert everyone[0][1].stats().rounds == 1


def _body(model: nn.Module) -> Tensor:
    return model.body.weight  # type: ignore[union-attr, return-value]


def _head(model: nn.Module) -> Tensor:
    return model.head.weight  # type: ignore[union-attr, return-value]


@pytest.mark.parametrize("text", outer_texts())
def test_a_resumed_run_ends_where_a_whole_one_does(text: str) -> None:
    """Five steps, save, load, five steps are ten steps, bit for bit; also with results under way."""
    whole = matched(text, M, 10)
    first = matched(text, M, 5)
    states = [
        {
            "model": learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "follower": learner.follower.state_dict(),
        }
        for learner, _ in first
    ]
    second = matched(text, M, 5, first=5, load=states)
    for (a, _), (b, _) in zip(whole, second, strict=True):
        assert torch.equal(a.follower.vector.read(), b.follower.vector.read())
        assert a.follower.stats().rounds == b.follower.stats().rounds


def test_a_state_is_safe_to_load(tmp_path: Any) -> None:
    state = walk("streaming:every=4,fragments=2,delay=2", 5)[0][1].state_dict()
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded["pending"] and loaded["anchor"].keys() == dict(Small().named_parameters()).keys()


def test_another_number_of_workers_keeps_anchor_and_sum_of_residuals() -> None:
    text = (
        "scheme:select=topk(rho=0.1,dense_below=0),memory=residual,exchange=all-gather,trigger=rounds(every=1),"
        "outer=nesterov"
    )
    states = [follower.state_dict() for _, follower, _ in walk(text, 3)]
    anchor = states[0]["anchor"]

    first = Small()

    def load(transport: InProcess) -> dict[str, Any]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        follower = Follower(OuterRounds(model, optimizer, outer(text), transport, in_background=False))
        follower.load_state_dict(states)
        return follower.state_dict()

    with logged():
        fewer = in_process(2, load)
    for place, name in enumerate(anchor):
        assert torch.equal(fewer[1]["anchor"][name], anchor[name])
        kept = [sum(s["session"]["memory"]["residual"][name] for s in all_of) for all_of in (states, fewer)]
        assert torch.allclose(kept[0], kept[1], atol=1e-6)
        assert torch.equal(
            fewer[0]["outer"]["state"][place]["momentum_buffer"], states[0]["outer"]["state"][place]["momentum_buffer"]
        )


def test_states_are_checked() -> None:
    _, follower, _ = walk(EXACT, 1, num_workers=1)[0]
    saved = follower.state_dict()
    with pytest.raises(StateError, match="no state of a follower of this version"):
        follower.load_state_dict({"format": 4})
    with pytest.raises(StateError, match="a list of all 3 states"):
        follower.load_state_dict({**saved, "num_workers": 3})
    with pytest.raises(StateError, match="another model"):
        follower.load_state_dict({**saved, "anchor": {}})
    late = walk("streaming:every=4,fragments=2,delay=2", 5, num_workers=1)[0][1].state_dict()
    other = walk("streaming:every=4,fragments=1,delay=2", 1, num_workers=1)[0][1]
    with pytest.raises(StateError, match=r"rounds\(every=4,fragments=2,delay=2\) are pending"):
        other.load_state_dict(late)


def test_a_drift_that_is_not_finite_leaves_the_anchor_alone() -> None:
    def spoiled(model: nn.Module, rank: int, number: int) -> None:
        wander(model, rank, number)
        if rank == 2 and number == 2:
            with torch.no_grad():
                _body(model)[0, 0] = torch.nan

    with logged() as said:
        everyone = walk("streaming:every=3,fragments=1,delay=0", 6, before_step=spoiled)
    assert [follower.stats().skipped_steps for _, follower, _ in everyone] == [1] * M
    assert all(bool(seen[-1].isfinite().all()) for _, _, seen in everyone)
    assert all(torch.equal(seen[-1], everyone[0][2][-1]) for _, _, seen in everyone)  # the round after is for all
    assert not torch.equal(everyone[0][2][2], everyone[1][2][2])  # who was finite kept its drift
    torch.manual_seed(3)
    start = trained(Small())
    assert torch.equal(everyone[2][2][2][: start.numel()], start)
    assert [one for one in said] == ["the model of rank 2 is not finite; it goes back to the anchor"]


@pytest.mark.parametrize("spoils_buffer", [False, True])
def test_a_nan_in_one_share_of_a_node_is_undone_in_all(spoils_buffer: bool) -> None:
    """What a share kept is as before, since its drift is told again; nodes of two processes, seen by virtual ones."""
    inside, across = ([_Meeting(2) for _ in range(2)] for _ in range(2))
    first = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
    text = "sparseloco:every=2,delay=0"

    def work(world: InProcess) -> list[dict[str, Tensor]]:
        node, share = divmod(world.rank, 2)
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        end = InProcess(node, across[share], 0)
        own_node = InProcess(share, inside[node], 0)
        follower = Follower(OuterRounds(model, optimizer, outer(text), end, node=own_node, in_background=False))
        kept = []
        for number in range(6):
            wander(model, node, number)
            if number == 3 and node == 0:
                state = model.state_dict()
                if not spoils_buffer:
                    state["0.weight"][0, 0] = torch.nan  # of the first share, in both of its processes
                elif share == 0:
                    state["1.running_mean"][0] = torch.nan
            follower.step()
            memory = follower.state_dict()["session"]["memory"]["residual"]
            kept.append({name: tensor.clone() for name, tensor in memory.items()})
        assert follower.stats().skipped_steps == 1 and bool(follower.vector.read().isfinite().all())
        return kept

    with logged(), one_core():
        everyone = in_process(4, work)
    for kept in everyone:
        assert kept[1] and all(torch.equal(kept[3][name], kept[1][name]) for name in kept[1])
        assert not all(torch.equal(kept[5][name], kept[1][name]) for name in kept[1])


@pytest.mark.parametrize("on_mismatch", ["warn", "error", "heal"])
def test_anchors_that_differ_are_told_apart(on_mismatch: OnMismatch) -> None:
    first = Small()

    def work(transport: InProcess) -> tuple[Tensor, Tensor, str]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"on_mismatch": on_mismatch, "check_replicas_every": 2}
        policy = OuterRounds(model, optimizer, outer(EXACT), transport, in_background=False, **options)
        follower = Follower(policy)
        said = ""
        for number in range(6):
            wander(model, transport.rank, number)
            if number == 4 and transport.rank == 1:
                policy.fragments[0].anchor[3] += 1
            try:
                follower.step()
            except LaconicError as error:
                said = str(error)
        return policy.fragments[0].anchor, follower.vector.read(), said

    named = "the parameters of rank 1 are not those of ranks 0, 2"
    with logged() as caught, one_core():
        found = in_process(3, work)
    assert [named in one for one in caught] == [True] * (on_mismatch != "error")
    for rank, (anchor, model, said) in enumerate(found):
        is_right = on_mismatch == "heal" or rank != 1
        assert torch.equal(anchor, found[0][0]) == is_right
        assert torch.allclose(model, found[0][1], atol=1e-6) == is_right  # one float32 rounding at this scale
        assert (named in said) == (on_mismatch == "error")


def test_a_nan_that_adam_keeps_does_not_end_agreement() -> None:
    """A worker that went back to the anchor goes on without the moments that would make it NaN again."""

    first = Small()

    def work(transport: InProcess) -> tuple[int, Tensor]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        follower = Follower(OuterRounds(model, optimizer, outer("diloco:every=2"), transport, in_background=False))
        for number in range(8):
            generator = torch.Generator().manual_seed(10 * number + transport.rank)
            loss = model(torch.randn(4, 30, generator=generator)).square().mean()
            optimizer.zero_grad()
            (loss * (torch.nan if transport.rank == 1 and number == 2 else 1)).backward()
            optimizer.step()
            follower.step()
        return follower.stats().skipped_steps, follower.vector.read()

    with logged(), one_core():
        found = in_process(2, work)
    assert [skipped for skipped, _ in found] == [1, 1]
    assert all(torch.equal(model, found[0][1]) and bool(model.isfinite().all()) for _, model in found)


def test_a_skipped_turn_is_told_again_once() -> None:
    """What a residual kept is as before the turn: the drift is still there, since the anchor has not moved."""
    text = "scheme:memory=residual,trigger=rounds(every=1),outer=sgd"
    count = trained(Small()).numel()

    def once(model: nn.Module, rank: int, number: int) -> None:
        with torch.no_grad():
            _body(model)[0, 0] += 1.0 if rank == 0 and number == 0 else 0.0
            _body(model)[0, 1] += torch.nan if rank == 1 and number == 0 else 0.0

    with logged():
        everyone = walk(text, 2, num_workers=2, before_step=once)
    torch.manual_seed(3)
    moved = everyone[0][2][-1][:count] - trained(Small())
    assert float(moved[0]) == pytest.approx(0.5) and float(moved[1:].abs().max()) < 1e-6


@pytest.mark.parametrize("text", ["local:every=1", "sparseloco:every=1,rho=0.125,chunk=512"])
def test_buffers_that_become_nan_heal(text: str) -> None:
    def spoiled(model: nn.Module, rank: int, number: int) -> None:
        wander(model, rank, number)
        mean = model.norm.running_mean  # type: ignore[union-attr]
        mean.fill_(torch.nan if rank == 1 and number == 1 else 1.0)  # type: ignore[operator]

    with logged():
        everyone = walk(text, 4, num_workers=2, before_step=spoiled)
    for model, follower, _ in everyone:
        assert bool((model.norm.running_mean == 1.0).all())  # type: ignore[union-attr]
        assert follower.stats().skipped_steps == 1


def test_the_average_leaves_out_a_model_that_is_not_finite() -> None:
    first = Small()

    def work(transport: InProcess) -> Tensor:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        follower = Follower(OuterRounds(model, optimizer, outer(EXACT), transport, in_background=False))
        wander(model, transport.rank, 0)
        if transport.rank == 1:
            with torch.no_grad():
                _head(model)[0, 0] = torch.nan
        follower.step()
        follower.average_()
        return follower.vector.read()

    with logged(), one_core():
        models = in_process(3, work)
    assert all(bool(model.isfinite().all()) and torch.equal(model, models[0]) for model in models)


def test_workers_that_made_other_numbers_of_steps_hear_so() -> None:
    first = Small()

    def work(transport: InProcess) -> str:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        follower = Follower(OuterRounds(model, optimizer, outer("local:every=9"), transport, in_background=False))
        for _ in range(3 + transport.rank):
            follower.step()
        with pytest.raises(PeerError) as raised:
            follower.average_()
        return str(raised.value)

    assert in_process(2, work) == ["workers made 3, 4 steps, by rank; let all make equally many"] * 2


def test_parameters_that_are_unfrozen_later_are_told() -> None:
    def unfrozen(model: nn.Module, rank: int, number: int) -> None:
        _head(model).requires_grad_(number > 0)

    with pytest.raises(StateError, match="follow anew"):
        walk("local:every=1", 2, before_step=unfrozen)


def test_a_step_that_one_worker_skips_counts_there_too() -> None:
    """As when a GradScaler finds an overflow on one worker alone."""

    def skipping(model: nn.Module, rank: int, number: int) -> None:
        if rank != 1 or number != 1:
            wander(model, rank, number)

    everyone = walk(EXACT, 3, before_step=skipping)
    assert all(torch.equal(seen[-1], everyone[0][2][-1]) for _, _, seen in everyone)


def test_frozen_parameters_stay_and_are_not_sent() -> None:
    def frozen() -> nn.Module:
        model = Small()
        model.head.requires_grad_(False)
        return model

    everyone = walk(EXACT, 3, make=frozen)
    torch.manual_seed(3)
    start = frozen()
    assert all(torch.equal(_head(model), _head(start)) for model, _, _ in everyone)
    assert "head.weight" not in everyone[0][1].state_dict()["anchor"]
    assert everyone[0][1].stats().bytes_out < walk(EXACT, 3)[0][1].stats().bytes_out


def test_tied_weights_travel_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8, bias=False)
            self.other = nn.Linear(8, 8, bias=False)
            self.other.weight = self.one.weight

    everyone = walk(EXACT, 3, make=Tied)
    assert list(everyone[0][1].state_dict()["anchor"]) == ["one.weight"]
    assert all(torch.equal(trained(model), trained(everyone[0][0])) for model, _, _ in everyone)


def test_buffers_are_averaged() -> None:
    def counting(model: nn.Module, rank: int, number: int) -> None:
        model.norm.running_mean.fill_(float(rank))  # type: ignore[union-attr, operator]

    everyone = walk("diloco:every=1,lr=0.1", 1, before_step=counting)
    assert all(bool((model.norm.running_mean == 1.5).all()) for model, _, _ in everyone)  # type: ignore[union-attr]


def test_a_model_in_bf16_has_an_anchor_in_float32() -> None:
    """Outer steps too small for the model's type add up in the anchor, until the model follows."""

    def one_way(model: nn.Module, rank: int, number: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)

    everyone = walk("local:every=1,lr=0.01,quantize=none", 60, make=_ones, before_step=one_way)
    model, follower, _ = everyone[0]
    anchor = follower.state_dict()["anchor"]["weight"]
    assert anchor.dtype == torch.float32 and float((anchor - 1).min()) > 0.004
    assert torch.equal(model.weight.detach(), anchor.to(torch.bfloat16))  # type: ignore[operator]


def _ones() -> nn.Module:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    return model


def test_any_torch_optimizer_may_be_the_outer_one() -> None:
    plain = walk(EXACT, 3)
    adam = walk(EXACT, 3, outer_optimizer=lambda anchors: torch.optim.Adam(anchors, lr=1e-3))
    assert not torch.equal(plain[0][2][-1], adam[0][2][-1])
    state = adam[0][1].state_dict()["outer"]["state"][0]
    assert {"exp_avg", "exp_avg_sq", "step"} <= state.keys()


def test_warm_up_agrees_on_everything_at_each_step() -> None:
    text = (
        "scheme:select=topk(rho=0.01,dense_below=0),memory=residual,exchange=all-gather,"
        "trigger=rounds(every=4,warmup=2),outer=sgd"
    )
    everyone = walk(text, 2)
    assert all(torch.equal(seen[0], everyone[0][2][0]) for _, _, seen in everyone)
    sent = everyone[0][1].stats().by_kind
    assert set(sent) == {"dense"}


def _climb(model: nn.Module, rank: int, number: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank + 1)  # 2.5 a step in the mean of four


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("diloco:every=2,lr=0.5,momentum=0.8,quantize=none,warmup=3", {1: 2.5, 2: 5, 3: 7.5, 5: 12, 7: 18.1}),
        ("local:every=2,lr=0.5,quantize=none,warmup=3", {1: 2.5, 2: 5, 3: 7.5, 5: 10, 7: 12.5}),
        ("scheme:exchange=pairs,trigger=rounds(every=2,warmup=3),outer=pair-momentum", {3: 7.5}),
    ],
)
def test_a_warm_up_averages_and_momentum_starts_after_it(text: str, moves: dict[int, float]) -> None:
    """D = -5 of two steps: the first outer step is 0.5 * (1 + 0.8) * 5, the second 0.5 * (5 + 0.8 * (0.8*5 + 5))."""
    torch.manual_seed(3)
    start = trained(Small())
    models = [seen for _, _, seen in walk(text, 7, before_step=_climb)]
    for step, move in moves.items():
        mean = torch.stack([seen[step - 1] for seen in models]).mean(0)[: start.numel()]
        assert torch.allclose(mean, start + move, atol=1e-5), step  # float32 at 18


def test_momentum_grows_where_drifts_go_along_an_earlier_step_and_falls_where_they_turn_back() -> None:
    momentum = OuterMomentum(Agreement(), torch.zeros(8), every=16, inner_momentum=0.9)
    assert momentum.lag == 2  # 32 steps, after which Adam has forgotten
    anchor = torch.zeros(8)
    values = []
    for drift in (1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0):
        values.append(momentum.adapt_(torch.full((8,), drift), anchor))
        anchor -= drift
    # 0.5 * (1 - 0.05) twice, which is over the most; then 0.5 * (-1 - 0.05) twice, till it turned two rounds ago.
    assert values == pytest.approx([0, 0, 0.475, 0.7, 0.175, 0, 0.475], abs=1e-5)


def test_a_sample_tells_the_agreement_of_large_fragments() -> None:
    """Of ten million heavy-tailed entries 65,536 give the cosine to two digits."""
    draw = torch.Generator().manual_seed(0)
    earlier, noise = torch.randn(2, 10_000_000, generator=draw).pow_(3)
    drift = 0.2 * earlier + noise
    exact = float(torch.nn.functional.cosine_similarity(drift, earlier, dim=0))
    momentum = OuterMomentum(Agreement(aim=0.0, gain=1.0), earlier, every=16, inner_momentum=0.0)
    momentum.adapt_(earlier, torch.zeros_like(earlier))
    assert momentum.adapt_(drift, -earlier) == pytest.approx(exact, abs=0.02)
    assert sum(anchor.nbytes for anchor in momentum.state_dict()["anchors"]) == 2 << 18


@pytest.mark.parametrize(
    ("make", "beta", "lag"),
    [
        (lambda model: torch.optim.AdamW(model.parameters()), 0.9, 7),
        (lambda model: torch.optim.SGD(model.parameters(), momentum=0.8), 0.8, 4),
        (Muon, 0.95, 13),
    ],
)
def test_the_lag_outlasts_the_momentum_of_the_inner_optimizer(
    make: Callable[[nn.Module], torch.optim.Optimizer], beta: float, lag: int
) -> None:
    assert inner_momentum(make(Small())) == beta
    assert Agreement().lag(4, beta) == lag
    assert Agreement().lag(round(2.5 / (1 - beta)), beta) == 1  # also where 1 - beta is rounded down


@pytest.mark.parametrize("text", ["streaming:every=2,fragments=2,delay=1,momentum=auto", "gossip:mode=matched,seed=4"])
def test_a_model_may_have_several_optimizers(text: str) -> None:
    """One for the body and one for the rest make what one for both makes."""

    def work(transport: InProcess, num_optimizers: int) -> tuple[Tensor, list[int]]:
        learner = Learner(text, transport.rank, lambda m, o, s: o, 0.1)
        body, others = [*learner.model.body.parameters()], [*learner.model.norm.parameters()]
        others += learner.model.head.parameters()
        parts = [body, others] if num_optimizers == 2 else [body + others]
        optimizers = [torch.optim.SGD(part, lr=0.1, momentum=0.5) for part in parts]
        scheme = parse(text)
        assert isinstance(scheme, OuterScheme | GossipScheme)
        options: dict[str, Any] = {"in_background": False} if scheme.of_what == "drift" else {}
        follower = Follower(policy_for(learner.model, optimizers, scheme, transport, **options))
        for number in range(6):
            wander(learner.model, transport.rank, number)
            for p in learner.model.parameters():
                p.grad = torch.full_like(p, 0.01)
            for optimizer in optimizers:
                optimizer.step()
            follower.step()
        return follower.vector.read(), [len(optimizer.state) for optimizer in optimizers]

    with one_core():
        one, two = (in_process(M, partial(work, num_optimizers=number)) for number in (1, 2))
    for (model, _), (same, states) in zip(one, two, strict=True):
        assert torch.equal(model, same) and all(states)


def test_another_number_of_workers_keeps_the_momentum_by_agreement() -> None:
    text = "streaming:every=2,fragments=2,delay=1,momentum=auto"
    states = [learner.follower.state_dict() for learner in drifted(text, M, 12)]

    def load(transport: InProcess) -> dict[str, Any]:
        learner = Learner(text, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        learner.follower.load_state_dict(states)
        assert learner.follower.stats().momentum > 0
        state: dict[str, Any] = learner.follower.state_dict()
        return state

    for state in (*states, *in_process(2, load)):
        for number, saved in states[0]["momenta"].items():
            assert state["momenta"][number]["value"] == saved["value"]
            assert all(map(torch.equal, state["momenta"][number]["anchors"], saved["anchors"]))


@pytest.mark.parametrize(("every", "fragments", "delay"), [(1, 1, 1), (4, 4, 2), (16, 8, 2), (64, 8, 4)])
def test_streaming_has_room_for_its_fragments_in_any_period(every: int, fragments: int, delay: int) -> None:
    assert outer(f"streaming:every={every}").when == Rounds(every=every, fragments=fragments, delay=delay)


def test_other_fragments_begin_their_momentum_anew() -> None:
    text = "streaming:every=2,fragments=2,delay=0"
    states = [learner.follower.state_dict() for learner in drifted(text, M, 12)]

    def go_on(transport: InProcess) -> float:
        learner = Learner(
            "streaming:every=2,fragments=1,delay=0", transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1
        )
        learner.follower.load_state_dict(states[transport.rank])
        begun = learner.follower.stats().momentum
        for number in range(6):
            learner.drift(number)
        return float(begun)

    assert in_process(M, go_on) == [0.0] * M


@pytest.mark.parametrize("text", ["streaming:every=4,fragments=2,delay=2", "gossip:mode=matched,seed=4"])
def test_to_evaluate_the_mean_changes_nothing(text: str) -> None:
    def work(transport: InProcess, evaluates: bool) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        learner = Learner(text, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        seen = []
        for number in range(10):
            learner.drift(number)
            if evaluates and number % 3 == 0:
                own = learner.follower.vector.read()
                with learner.follower.averaged():
                    seen.append((own, learner.follower.vector.read()))
                assert torch.equal(own, learner.follower.vector.read())
        return learner.follower.vector.read(), seen

    with one_core():
        plain, evaluated = (in_process(M, partial(work, evaluates=evaluates)) for evaluates in (False, True))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, evaluated, strict=True))
    for of_ranks in zip(*(seen for _, seen in evaluated), strict=True):
        mean = torch.stack([own for own, _ in of_ranks]).mean(0)
        assert all(torch.allclose(inside, mean, atol=1e-6) for _, inside in of_ranks)  # one float32 rounding


def test_average_ends_with_one_model() -> None:
    def work(transport: InProcess) -> Tensor:
        text = "streaming:every=4,fragments=2,delay=2"
        learner = Learner(text, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        for number in range(5):
            learner.drift(number)
        assert consensus(learner.follower)[1] > 0
        learner.follower.average_()
        assert consensus(learner.follower)[1] == 0
        model: Tensor = learner.follower.vector.read()
        return model

    models = in_process(M, work)
    assert all(torch.equal(model, models[0]) for model in models)


def test_stats_tell_turns_and_bytes() -> None:
    stats = walk(EXACT, 6)[0][1].stats()
    assert (stats.steps, stats.rounds, stats.skipped_steps) == (6, 2, 0)
    assert stats.ratio == pytest.approx(3, rel=0.1)  # buffers of the norm too
    assert "6 steps (0 skipped), 4 workers, 2 rounds" in str(stats)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local:every=0", "1 or more"),
        ("local:every=4,fragments=5", "give 1 to every, 4"),
        ("local:every=4,delay=5", "one round at a time"),
        ("diloco:momentum=1", r"a number in \(0, 1\)"),
        ("diloco:lr=0", "a rate above 0"),
        ("scheme:trigger=rounds(mix=1)", r"a share in \[0, 1\)"),
        ("scheme:trigger=rounds(mix=0.5)", "delayed results"),
        ("scheme:memory=momentum,trigger=rounds", "use Residual"),
        ("scheme:trigger=warm-up(steps=2),outer=sgd", "use trigger=Rounds"),
        ("scheme:exchange=gossip,trigger=rounds", "use GossipScheme"),
        ("scheme:select=topk(rho=0.1),trigger=rounds", "exchange=AllGather"),
        ("scheme:select=low-rank(form=alternating),memory=residual,trigger=rounds(fragments=2)", "use fragments=1"),
        ("scheme:select=randk(rho=0.5,mode=cycle),trigger=rounds(fragments=2)", "use fragments=1"),
        ("scheme:exchange=pairs", "use outer=PairMomentum"),
        ("scheme:outer=pair-momentum", "use exchange=Pairs"),
        ("scheme:select=topk(rho=0.1),exchange=pairs,outer=pair-momentum", "use select=Everything"),
        ("scheme:exchange=pairs,outer=pair-momentum,memory=residual", "memory=Nothing"),
        ("noloco:quantize=sign", r"BF16\(\), FP16\(\) or Exact\(\)"),
        ("noloco:momentum=0.8,pull=0.72", r"in \(0, 0.72\)"),
        ("noloco:momentum=1", r"in \[0, 1\)"),
    ],
)
def test_wrong_answers_say_what_fits(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse(text)


def test_follow_refuses_gradients_and_models_without_parameters() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SchemeError, match=r"use laconic\.attach"):
        follow(model, optimizer, "topk")
    with pytest.raises(SchemeError, match="leave outer_optimizer="):
        follow(model, optimizer, "gossip", outer_optimizer=torch.optim.SGD)
    with pytest.raises(SchemeError, match="no parameter"):
        walk(EXACT, 1, make=nn.ReLU, num_workers=1)


PAIRS = "noloco:every=1,quantize=none"


def _anchor(follower: Follower) -> Tensor:
    return torch.cat([anchor.reshape(-1) for anchor in follower.state_dict()["anchor"].values()])


def test_gradients_do_not_go_in_pairs() -> None:
    with pytest.raises(SchemeError, match=r"use AllReduce\(\), or OuterScheme"):
        attach(nn.Linear(2, 2), Scheme(exchange=Pairs()))


@pytest.mark.parametrize("num_workers", [1, 4, 5])
def test_anchors_take_the_step_of_their_pair(num_workers: int) -> None:
    """b = momentum*b - lr*mean(d) - pull*(a - mean(a)) ; a += b ; x = a, with the partner of each turn."""
    text = "noloco:every=1,quantize=none,lr=0.6,momentum=0.4,pull=0.9,seed=7"
    everyone = walk(text, 4, num_workers=num_workers)
    torch.manual_seed(3)
    model = Small()
    anchors = [trained(model)] * num_workers
    momenta = [torch.zeros_like(anchors[0])] * num_workers
    for turn in range(4):
        drifts = []
        for rank in range(num_workers):
            nn.utils.vector_to_parameters(anchors[rank].clone(), model.parameters())
            wander(model, rank, turn)
            drifts.append(anchors[rank] - trained(model))
        partners = matching("uniform", 7, turn, num_workers)
        pairs = list(enumerate(partners))
        pulls = [0.9 * (anchors[i] - anchors[j]) / 2 for i, j in pairs]
        momenta = [0.4 * momenta[i] - 0.6 * (drifts[i] + drifts[j]) / 2 - pulls[i] for i, j in pairs]
        anchors = [anchor + momentum for anchor, momentum in zip(anchors, momenta, strict=True)]
        for (_, _, seen), anchor in zip(everyone, anchors, strict=True):
            assert torch.allclose(seen[turn][: anchor.numel()], anchor, atol=1e-6)
        assert sum(i == j for i, j in pairs) == num_workers % 2


@pytest.mark.parametrize("quantize", ["none", "bf16"])
def test_the_mean_of_anchors_in_pairs_heeds_all_drifts(quantize: str) -> None:
    """Pulls and rounding cancel within a pair: the mean moves as if all had told all, with momentum."""
    seen: list[list[Tensor]] = [[] for _ in range(M)]

    def noted(model: nn.Module, rank: int, number: int) -> None:
        before = trained(model)
        wander(model, rank, number)
        seen[rank].append(before - trained(model))

    everyone = walk(f"noloco:every=1,quantize={quantize}", 6, before_step=noted)
    torch.manual_seed(3)
    mean = trained(Small())
    momentum = torch.zeros_like(mean)
    for turn in range(6):
        momentum = 0.5 * momentum - 0.7 * torch.stack([drifts[turn] for drifts in seen]).mean(0)
        mean += momentum
    found = torch.stack([_anchor(follower) for _, follower, _ in everyone])
    assert torch.allclose(found.mean(0), mean, atol=1e-6)
    assert not torch.equal(found[0], found[1])


def test_anchors_come_together_where_nobody_drifts() -> None:
    def pushed(model: nn.Module, rank: int, number: int) -> None:
        if number == 0:
            wander(model, rank, number)

    def apart(steps: int) -> float:
        anchors = torch.stack([_anchor(follower) for _, follower, _ in walk(PAIRS, steps, before_step=pushed)])
        return float((anchors - anchors.mean(0)).norm())

    assert apart(20) < 0.05 * apart(1)  # 0.75 a round


def test_who_is_not_finite_is_heard_of_by_its_partner_alone() -> None:
    def spoiled(model: nn.Module, rank: int, number: int) -> None:
        wander(model, rank, number)
        if rank == 2 and number == 1:
            with torch.no_grad():
                _body(model)[0, 0] = torch.nan

    partner = matching("uniform", 0, 1, M)[2]
    with logged("rank 2 is not finite"):
        everyone = walk(PAIRS, 4, before_step=spoiled)
    whole = walk(PAIRS, 4)
    for rank, (_, follower, seen) in enumerate(everyone):
        assert follower.stats().skipped_steps == (rank in (2, partner))
        assert bool(seen[-1].isfinite().all())
        assert torch.equal(seen[1], whole[rank][2][1]) == (rank not in (2, partner))
    count = trained(everyone[2][0]).numel()
    assert torch.equal(everyone[2][2][1][:count], everyone[2][2][0][:count])  # back at its anchor


@pytest.mark.parametrize("quantize", ["none", "bf16", "fp16"])
def test_bytes_of_pairs_are_those_foretold(quantize: str) -> None:
    """A vector a round, whatever M is; of five workers one is alone at each turn."""
    text = f"noloco:every=1,quantize={quantize}"
    for num_workers in (4, 5):
        found = walk(text, 2, make=lambda: nn.Linear(9, 7), num_workers=num_workers)
        foretold = bytes_out(outer(text).exchanged, Layout.of(["weight", "bias"], [63, 7]), num_workers)
        sent = [follower.stats().bytes_out for _, follower, _ in found]
        assert sum(sent) == 2 * num_workers * foretold
        assert set(found[0][1].stats().by_kind) == {"pairs"}


@pytest.mark.parametrize("recipe", ["streaming", "muloco"])
@pytest.mark.parametrize("num_workers", [2, 4, 16])
def test_two_bits_cost_about_half_of_four_among_any_number(recipe: str, num_workers: int) -> None:
    layout = Layout.of(["weight"], [1 << 20])
    two, four = (bytes_out(outer(f"{recipe}:bits={bits}").exchanged, layout, num_workers) for bits in (2, 4))
    assert 0.5 < two / four < 0.53


@pytest.mark.parametrize("recipe", ["streaming", "muloco"])
def test_what_two_bits_leave_out_goes_with_later_rounds(recipe: str) -> None:
    """Models that move once and then stand still come to their mean."""

    def move_once(model: nn.Module, rank: int, number: int) -> None:
        if number == 0:
            wander(model, rank, number)

    alone = walk("local:every=9,quantize=none", 1)
    mean = torch.stack([trained(model) for model, _, _ in alone]).mean(0)
    everyone = walk(f"{recipe}:every=1,fragments=1,delay=0,bits=2,lr=1,momentum=0", 40, before_step=move_once)
    first, last = ((everyone[0][2][at][: mean.numel()] - mean).norm() for at in (0, -1))
    assert last < 1e-4 * first


def test_average_gives_workers_in_pairs_one_anchor() -> None:
    def work(transport: InProcess) -> tuple[Tensor, Tensor]:
        learner = Learner("noloco:every=2", transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        for number in range(5):
            learner.drift(number)
        learner.follower.average_()
        return learner.follower.vector.read(), _anchor(learner.follower)

    first, *others = in_process(M, work)
    for model, anchor in others:
        assert torch.equal(model, first[0]) and torch.equal(anchor, first[1])


@pytest.mark.parametrize("text", outer_texts())
def test_models_drift_no_further_than_a_round(text: str) -> None:
    """Every scheme of the table brings the models together again and again."""
    learners = drifted(text, M, 8)
    together = torch.stack([learner.follower.vector.read() for learner in learners]).double()
    apart = torch.stack([learner.follower.vector.read() for learner in drifted("local:every=9", M, 8)]).double()
    assert float((together - together.mean(0)).norm()) < 0.95 * float((apart - apart.mean(0)).norm())
