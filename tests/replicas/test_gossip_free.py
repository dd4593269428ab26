"""Gossip without a barrier: the sum over all models is unchanged whatever the delays."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from laconic import layout
from laconic.replicas.gossip.free import Free
from tests.gossiping import FREE_TEXTS, Learner, free, learner_at, vectors_of
from tests.local_mailbox import local_mailboxes


@pytest.mark.parametrize(("text", "worth_halving"), [*((text, 10_000) for text in FREE_TEXTS), ("gossip", 2)])
def test_frozen_workers_keep_the_mean_of_all_models_whatever_the_delays(
    text: str, worth_halving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning is frozen, models begin apart; exchanges cross each other, and the mean stays, to float rounding."""
    monkeypatch.setattr(layout, "WORTH_HALVING", worth_halving)
    starts: dict[int, Tensor] = {}

    def work(learner: Learner) -> None:
        with torch.no_grad():
            for p in learner.model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(learner.rank)))
        starts[learner.rank] = learner.follower.read()
        for _ in range(80):
            learner.follower.step()
        learner.follower.settle()

    learners = free(text, 5, work, lr=0.1, longest_delay_s=0.001)
    before, after = torch.stack([starts[r] for r in range(5)]), vectors_of(learners)
    stats = [learner.follower.stats() for learner in learners]
    assert sum(s.asked for s in stats) == sum(s.answered for s in stats) > 0
    # A few hundred float32 additions to values up to 4: each errs by 2e-7 at most.
    torch.testing.assert_close(after.double().mean(0), before.double().mean(0), atol=5e-6, rtol=0)
    assert sum(s.bytes_out for s in stats) == sum(s.bytes_in for s in stats)
    if "every" in text:  # enough exchanges to see them meet
        assert (after - after.mean(0)).norm() < 0.5 * (before - before.mean(0)).norm()
    if worth_halving == 2:  # as those of either half do
        for old, new in zip(before.chunk(2, 1), after.chunk(2, 1), strict=True):
            assert (new - new.mean(0)).norm() < 0.9 * (old - old.mean(0)).norm()


def test_free_workers_learn_and_a_global_average_makes_them_equal() -> None:
    losses: dict[int, list[float]] = {}

    def work(learner: Learner) -> None:
        losses[learner.rank] = [learner.step(number) for number in range(60)]
        learner.follower.average_()

    learners = free("gossip:rate=0.3", 4, work, lr=0.1)
    models = vectors_of(learners)
    assert all(torch.equal(models[0], model) for model in models)
    assert all(sum(of[-5:]) < 0.5 * sum(of[:5]) for of in losses.values())
    assert "4 workers" in str(learners[0].follower.stats())


def test_what_was_exchanged_is_not_said_again() -> None:
    """While an answer is under way a group stays loud; once it has come there is nothing left to say."""
    arrived, released = threading.Event(), threading.Event()

    def delay() -> None:
        arrived.set()
        released.wait()

    boxes = local_mailboxes(2, delay)
    learners = [learner_at(box, "gossip:rho=1,trigger=change(threshold=0.1)", 0.1) for box in boxes]
    with torch.no_grad():
        learners[0].model.body.weight.add_(1.0)
    for _ in range(5):
        learners[0].follower.step()
    assert arrived.wait(30)
    released.set()
    learners[0].follower._side.close()
    for _ in range(5):
        learners[0].follower.step()
    assert learners[0].follower.stats().asked == 1


def test_a_closed_peer_is_dropped_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    boxes = local_mailboxes(3)
    learners = [learner_at(box, "gossip-every", 0.1) for box in boxes]
    learners[2].follower.close()
    for number in range(12):
        for learner in learners[:2]:
            learner.step(number)
    for learner in learners[:2]:
        stats = learner.follower.stats()
        assert list(stats.lost) == [2] and stats.asked >= 10
        assert "without rank 2" in str(stats)
    said = caplog.messages
    assert len(said) == 2 and all("rank 2 is gone" in line and "going on without it" in line for line in said)


@pytest.mark.parametrize("deed", ["ask_", "reply_"])
def test_what_fails_in_another_thread_ends_training(deed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be printed at every exchange, while models trained on alone."""
    side, other = (learner_at(box, "gossip", 0.1).follower._side for box in local_mailboxes(2))
    failing = side if deed == "ask_" else other
    assert isinstance(side, Free) and isinstance(failing, Free)
    monkeypatch.setattr(failing.messages, deed, lambda *_: 1 / 0)
    assert side._begin(1, 0, list(range(len(side.vector.groups)))).wait(60)
    with pytest.raises(ZeroDivisionError):
        for _ in range(1000):  # the thread notes it when it can
            failing.step(0, 0.1)
            time.sleep(0.001)


@pytest.mark.parametrize("text", ["gossip-every", "gossip:trigger=every-step"])
def test_a_model_that_is_not_finite_is_not_taken_in(text: str, caplog: pytest.LogCaptureFixture) -> None:
    boxes = local_mailboxes(2)
    learners = [learner_at(box, text, 0.1) for box in boxes]
    with torch.no_grad():
        next(learners[1].model.parameters())[0] = torch.nan
    for learner in learners:
        learner.follower.step()
        learner.follower._side.close()
    assert torch.isfinite(learners[0].follower.read()).all()
    assert sum(learner.follower.stats().refused for learner in learners) >= 2
    assert "not finite" in caplog.text
