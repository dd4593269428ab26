"""Gossip without a barrier, free or by appointment: the sum over all models is unchanged whatever the delays."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from laconic import layout
from laconic.exchange import matching
from laconic.replicas.messages import refusal
from tests.gossiping import FREE_TEXTS, Learner, free, learner_at, vectors_of
from tests.local_mailbox import local_mailboxes
from tests.workers import wait_until


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
        starts[learner.rank] = learner.follower.vector.read()
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


def test_what_was_exchanged_is_not_sent_again() -> None:
    """While a reply is in flight a group stays over its threshold; once it has come nothing is left to send."""
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
    assert wait_until(lambda: bool(learners[0].follower.stats().asked))
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


@pytest.mark.parametrize("fails", ["request_", "reply_"])
def test_what_fails_in_another_thread_ends_training(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be printed at every exchange, while models trained on alone."""
    asker, other = (learner_at(box, "gossip-every:mode=free", 0.1).follower for box in local_mailboxes(2))
    failing = asker if fails == "request_" else other
    monkeypatch.setattr(failing.policy.messages, fails, lambda *_: 1 / 0)
    if failing is other:
        asker.step()
    with pytest.raises(ZeroDivisionError):
        for _ in range(1000):  # the thread notes it when it can
            failing.step()
            time.sleep(0.001)


@pytest.mark.parametrize("text", ["gossip-every", "gossip:trigger=every-step"])
def test_a_model_that_is_not_finite_is_not_taken_in(text: str, caplog: pytest.LogCaptureFixture) -> None:
    boxes = local_mailboxes(2)
    learners = [learner_at(box, text, 0.1) for box in boxes]
    with torch.no_grad():
        next(learners[1].model.parameters())[0] = torch.nan
    for learner in learners:
        learner.follower.step()
        learner.follower.close()
    assert torch.isfinite(learners[0].follower.vector.read()).all()
    assert sum(learner.follower.stats().refused for learner in learners) >= 2
    assert "not finite" in caplog.text


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

    learners = free("scheme:exchange=gossip(mode=paired,wait_budget=1e6)", 8, work, lr=0.0)
    models = vectors_of(learners)
    assert torch.allclose(models, models[0].expand_as(models), atol=1e-6)  # roundings of three halvings, at most 2
    stats = [learner.follower.stats() for learner in learners]
    assert sum(each.asked for each in stats) == sum(each.answered for each in stats) == 6 * 4 * parts
    assert not any(each.late for each in stats)


def test_an_answer_that_does_not_come_keeps_a_worker_from_no_other_appointment(halved: None) -> None:
    boxes = local_mailboxes(4)
    scheme = "scheme:exchange=gossip(mode=paired,wait_budget=1e6,patience=0.05)"
    learner, *_ = [learner_at(box, scheme, 0.0) for box in boxes]
    never = threading.Event()

    def stuck(peer: int, number: int, message: Tensor, num_bytes: int) -> Tensor:
        never.wait()
        return refusal(num_bytes)

    boxes[3].listen(stuck)
    rounds = range(16)
    for _ in rounds:  # the others do not step, but answer
        learner.follower.step()
        assert wait_until(lambda: not learner.follower.policy._asking.keys() - {3})  # else they would not be waited for
    asked = [matching("uniform", 0, t, 4)[0] for t in rounds]
    assert {1, 2, 3} == set(asked)
    stats = learner.follower.stats()
    assert stats.asked == len([partner for partner in asked if partner != 3]) and stats.late == 1
    never.set()
