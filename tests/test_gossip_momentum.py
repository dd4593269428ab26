"""Momentum that heeds what peers move a model by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossiping import Learner, matched
from laconic.exchange import InProcess, in_process
from laconic.follow import Follower
from laconic.follow.momentum import Momentum


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
    Momentum(optimizer).heed_([(moved, way), (buffer, way), (slow, way)])
    expected = {moved: 1 - 0.1 * way / 0.1, still: torch.ones(3), slow: 1 - 0.1 * way / 0.01}
    for parameter, velocity in expected.items():
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], velocity)


@pytest.mark.parametrize("made", ["adam", "no momentum", "no rate", "no step yet"])
def test_what_has_no_momentum_to_heed_with_is_left_alone(made: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        [parameter], lr=0.0 if made == "no rate" else 0.1, momentum=0.0 if made == "no momentum" else 0.9
    )
    if made == "adam":
        optimizer = torch.optim.Adam([parameter])
    if made != "no step yet":
        _stepped(optimizer, [parameter])
    before = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[parameter].items()}
    Momentum(optimizer).heed_([(parameter, torch.ones(2))])
    after = optimizer.state[parameter]
    assert set(after) == set(before)
    assert all(torch.equal(torch.as_tensor(after[key]), before[key]) for key in before)


def test_momenta_draw_near_and_their_sum_stays() -> None:
    def work(medium: InProcess) -> list[Tensor]:
        learner = Learner("gossip:mode=matched,rate=2", medium.rank, lambda m, o, s: Follower(m, o, s, medium), 0.1)
        learner.step(0)
        seen = [_momentum(learner)]
        learner.drift(1)
        for _ in range(3):
            learner.follower.step()
        return [*seen, _momentum(learner)]

    before, after = (torch.stack(rows).double() for rows in zip(*in_process(2, work), strict=True))
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.sum(0), before.sum(0), atol=1e-6, rtol=0)  # float32 additions to values near 1


def test_momentum_is_quasi_global_unless_local_is_asked_for() -> None:
    runs = {
        momentum: torch.stack(
            [_momentum(learner) for learner, _ in matched(f"gossip:mode=matched,rate=2{momentum}", 2, 12)]
        )
        for momentum in ("", ",momentum=quasi-global", ",momentum=local")
    }
    assert torch.equal(runs[""], runs[",momentum=quasi-global"])
    assert not torch.equal(runs[""], runs[",momentum=local"])


def _momentum(learner: Learner) -> Tensor:
    state = learner.optimizer.state
    return torch.cat([state[p]["momentum_buffer"].view(-1) for p in learner.model.parameters()])
