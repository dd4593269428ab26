"""Gossip by appointment."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from laconic import layout
from laconic.exchange import matching
from laconic.replicas.messages import refusal
from tests.gossiping import Learner, free, learner_at, vectors_of
from tests.local_mailbox import local_mailboxes


@pytest.mark.parametrize(("worth_halving", "parts"), [(2, 2), (10_000, 1)])
def test_pairs_wait_for_each_other_and_agree_after_all_directions(
    worth_halving: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "WORTH_HALVING", worth_halving)
    together = threading.Barrier(8)

    def work(learner: Learner) -> None:
        for number in range(3):
            together.wait()
            learner.drift(number)
        for _ in range(3):  # a hypercube of eight corners has three directions
            together.wait()
            learner.follower.step()

    learners = free("scheme:exchange=gossip(mode=paired,grace=1e6)", 8, work, lr=0.0)
    models = vectors_of(learners)
    assert torch.allclose(models, models[0].expand_as(models), atol=1e-6)  # roundings of three halvings, at most 2
    stats = [learner.follower.stats() for learner in learners]
    assert sum(each.asked for each in stats) == sum(each.answered for each in stats) == 6 * 4 * parts
    assert not any(each.late for each in stats)


def test_an_answer_that_does_not_come_keeps_a_worker_from_no_other_appointment(halved: None) -> None:
    boxes = local_mailboxes(4)
    scheme = "scheme:exchange=gossip(mode=paired,grace=1e6,patience=0.05)"
    learner, *_ = [learner_at(box, scheme, 0.0) for box in boxes]
    never = threading.Event()

    def stuck(peer: int, number: int, message: Tensor, num_bytes: int) -> Tensor:
        never.wait()
        return refusal(num_bytes)

    boxes[3].listen(stuck)
    rounds = range(16)
    for _ in rounds:  # the others do not step, but answer
        learner.follower.step()
        while learner.follower.policy._asking.keys() - {3}:  # else they would not be waited for
            time.sleep(0.001)
    asked = [matching("uniform", 0, t, 4)[0] for t in rounds]
    assert {1, 2, 3} == set(asked)
    stats = learner.follower.stats()
    assert stats.asked == len([partner for partner in asked if partner != 3]) and stats.late == 1
    never.set()
