"""Momentum that heeds what peers move a model by."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import SchemeError
from laconic.recipes import parse
from laconic.replicas.gossip import QuasiGlobalMomentum
from laconic.scheme import GossipScheme
from tests.gossiping import Learner, learner_at, matched
from tests.local_mailbox import local_mailboxes


def _stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_way_counts_as_a_step_that_the_optimizer_made() -> None:
    moved, still, slow = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = torch.optim.SGD([moved, still], lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": [slow], "lr": 0.01})
    _stepped(optimizer, [moved, still, slow])
    way, buffer = torch.tensor([1.0, 0.0, -2.0]), torch.zeros(3)
    QuasiGlobalMomentum(optimizer).follow_([(moved, way), (buffer, way), (slow, way)], 1, 1.0)
    expected = {moved: 1 - 0.1 * way / 0.1, still: torch.ones(3), slow: 1 - 0.1 * way / 0.01}
    for parameter, velocity in expected.items():
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], velocity)


@pytest.mark.parametrize("made", ["adam", "no momentum", "no rate", "a low rate", "no step yet", "sparse"])
def test_what_has_no_momentum_to_heed_with_is_left_alone(made: str) -> None:
    rows = nn.Embedding(3, 2, sparse=made == "sparse")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        rows.parameters(), lr=0.0 if made == "no rate" else 0.1, momentum=0.0 if made == "no momentum" else 0.9
    )
    if made == "adam":
        optimizer = torch.optim.Adam(rows.parameters())
    if made != "no step yet":
        rows(torch.tensor([1])).sum().backward()
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    QuasiGlobalMomentum(optimizer).follow_([(rows.weight, torch.ones(3, 2))], 1, 0.001 if made == "a low rate" else 1.0)
    after = optimizer.state_dict()["state"]
    assert str(after) == str(before) and (made != "no step yet" or not after)


@pytest.mark.parametrize("gap", [1, 2, 7, 16, 40])
@pytest.mark.parametrize("mu", [0.5, 0.9])
def test_two_that_exchange_seldom_do_not_run_past_each_other(gap: int, mu: float) -> None:
    """With (1 - mu) whatever the gap, their distance would only change its sign: 2, -1.77, 1.55 at a gap of 40."""
    ends = [nn.Parameter(torch.tensor([at])) for at in (-1.0, 1.0)]
    optimizers = [torch.optim.SGD([end], lr=0.1, momentum=mu) for end in ends]
    apart = []
    for _ in range(3):
        for _ in range(gap):
            for end, optimizer in zip(ends, optimizers, strict=True):
                end.grad = torch.zeros(1)
                optimizer.step()
        way = (ends[1] - ends[0]).detach() / 2
        apart.append(abs(2 * float(way)))
        for end, optimizer, own in zip(ends, optimizers, (way, -way), strict=True):
            end.data += own
            QuasiGlobalMomentum(optimizer).follow_([(end, own)], gap, 1.0)
    assert apart[0] == 2 and apart[1] < 0.4 * apart[0] and apart[2] < 0.9 * apart[1] + 1e-6


def test_momenta_draw_near_and_their_sum_stays() -> None:
    local, heeding = (
        torch.stack([_momentum(learner) for learner, _ in matched(f"gossip:mode=matched,rate=2,momentum={kind}", 2, 1)])
        for kind in ("local", "quasi-global")
    )
    assert (heeding[0] - heeding[1]).norm() < 0.7 * (local[0] - local[1]).norm()  # half, but for rounding
    torch.testing.assert_close(heeding.sum(0), local.sum(0), atol=1e-6, rtol=0)  # float32 additions to values near 1


def test_momenta_heed_peers_in_free_mode_too() -> None:
    found = []
    for kind in ("local", "quasi-global"):
        learners = [learner_at(box, f"gossip:mode=wait,rate=2,momentum={kind}", 0.1) for box in local_mailboxes(2)]
        for learner in learners:
            learner.step(0)
        for learner in learners:
            learner.follower.policy.apply_due_(0)
            learner.follower.policy.close()
        found.append(torch.stack([_momentum(learner) for learner in learners]))
    local, heeding = found
    assert not torch.equal(local[0], heeding[0]) and not torch.equal(local[1], heeding[1])
    torch.testing.assert_close(heeding.sum(0), local.sum(0), atol=1e-6, rtol=0)


def test_momentum_heeds_where_remainders_are_told_unless_local_is_asked_for() -> None:
    for text, kind in {
        "gossip": "quasi-global",
        "gossip:momentum=local": "local",
        "gossip:rho=0.2": "local",
        "gossip:rho=0.2,momentum=quasi-global": "quasi-global",
        "gossip-every": "local",
        "gossip-change": "quasi-global",
        "gossip-period:momentum=local": "local",
        "scheme:exchange=gossip(momentum=quasi-global)": "quasi-global",
    }.items():
        scheme = parse(text)
        assert isinstance(scheme, GossipScheme)
        assert scheme.exchange.momentum == kind, text
    with pytest.raises(SchemeError, match=r"give one of local, quasi-global"):
        parse("gossip:momentum=none")


def _momentum(learner: Learner) -> Tensor:
    state = learner.optimizer.state
    return torch.cat([state[p]["momentum_buffer"].view(-1) for p in learner.model.parameters()])
