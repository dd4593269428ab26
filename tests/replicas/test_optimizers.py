"""A reminder: a model that is trained and never exchanged is one line, and one that is exchanged is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laconic import Follower
from laconic.replicas import OuterRounds
from laconic.transport import InProcess, in_process
from tests.logs import logged
from tests.replicas.test_rounds import outer


def _warnings(calls_step: bool) -> list[str]:
    def work(transport: InProcess) -> None:
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheme = outer("local:every=2")
        follower = Follower(OuterRounds(model, optimizer, scheme, transport, in_background=False))
        for step in range(60):
            torch.optim.SGD(other.parameters(), lr=0.1).step()  # which is nothing to it
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if calls_step and step > 10:
                follower.step()
                assert not optimizer._optimizer_step_post_hooks
        follower.close()
        assert not optimizer._optimizer_step_post_hooks

    with logged() as lines:
        in_process(1, work)
    return [line for line in lines if "nothing was exchanged" in line]


@pytest.mark.parametrize("calls_step", [False, True])
def test_who_never_calls_step_is_told_once(calls_step: bool) -> None:
    lines = _warnings(calls_step)
    assert len(lines) == (not calls_step)
    assert calls_step or ("20 steps" in lines[0] and "follower.step()" in lines[0])
