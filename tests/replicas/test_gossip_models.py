"""Gossip of models that are not as tame as a test's: odd buffers, variances of unlike size, one that is not finite."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic import Follower, GossipScheme, StateError, parse
from laconic.replicas import consensus, policy_for
from laconic.replicas.vector import ModelVector
from laconic.transport import InProcess, in_process, open_mailbox
from tests.gossiping import Learner, free, learner_at
from tests.local_mailbox import local_mailboxes


class Odd(nn.Module):
    """A layer beside a mask, a table that is not saved, and parameters without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("table", torch.full((8,), -1e4), persistent=False)
        self.register_buffer("mean", torch.zeros(8))


@pytest.mark.parametrize("per", ["model", "half", "tensor"])
def test_masks_unsaved_buffers_and_empty_tensors_do_not_travel(per: str) -> None:
    vector = ModelVector(Odd(), per)
    assert set(vector.layout.names) == {"body.weight", "body.bias", "mean"}
    assert all(group.num_entries for group in vector.groups)


@pytest.mark.parametrize("text", ["gossip", "gossip-every", "gossip:quantize=bf16,rate=0.12"])
def test_models_with_odd_tensors_meet(text: str) -> None:
    scheme = parse(text)
    assert isinstance(scheme, GossipScheme)
    boxes, models = local_mailboxes(1), [Odd()]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    follower = Follower(policy_for(models[0], optimizer, scheme, boxes[0]))
    for _ in range(5):
        follower.step()
    mean, distance = consensus(follower)
    assert bool(mean.isfinite().all()) and distance == 0
    follower.close()


def test_a_variance_moves_by_half_of_itself_at_most() -> None:
    norm = nn.BatchNorm1d(4)
    norm.running_var.copy_(torch.tensor([100.0, 1.0, 0.01, 0.0]))  # type: ignore[union-attr]
    vector = ModelVector(norm, "model")
    delta = torch.zeros(vector.num_entries)
    for span in vector.layout.spans:
        delta[span.start : span.stop] = torch.tensor([-20.0, -3.0, 0.4, 0.0]) if span.name != "weight" else -3.0
    vector.move_(delta, [0])
    assert norm.running_var.tolist() == pytest.approx([80, 0.5, 0.015, 0])  # type: ignore[union-attr]
    assert norm.running_mean.tolist() == pytest.approx([-20, -3, 0.4, 0])  # type: ignore[union-attr]
    assert norm.weight.tolist() == [-2, -2, -2, -2]


def test_norms_of_features_of_unlike_scale_answer_numbers() -> None:
    scale = torch.cat([torch.full((15,), 10.0), torch.full((15,), 0.1)])

    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.norm, self.inner = nn.BatchNorm1d(30), inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.norm(x * scale))  # type: ignore[no-any-return]

    lowest = []
    # The recipe `gossip` but for waiting: two that step in turns in one thread would wait in vain.
    where = "gossip(mode=paired,momentum=quasi-global,wait_budget=0)"
    unwaiting = f"scheme:quantize=modulo,exchange={where},trigger=period(steps=0.77)"

    def start(box_number: int) -> Learner:
        def follow(model: nn.Module, optimizer: torch.optim.Optimizer, scheme: GossipScheme) -> Follower:
            scaled = Scaled(model)
            optimizer.add_param_group({"params": list(scaled.norm.parameters())})
            models[box_number] = scaled
            return Follower(policy_for(scaled, optimizer, scheme, boxes[box_number]))

        learner = Learner(unwaiting, box_number, follow, 0.05)
        learner.model = models[box_number]
        return learner

    boxes = local_mailboxes(2)
    models: dict[int, Any] = {}
    learners = [start(0), start(1)]
    for number in range(60):
        for learner in learners:
            learner.step(number)
        lowest += [float(models[rank].norm.running_var.min()) for rank in models]
    assert min(lowest) > 0
    for learner in learners:
        learner.follower.close()


def test_one_model_that_is_not_finite_is_left_out_of_the_mean_and_healed_by_it() -> None:
    def work(learner: Learner) -> None:
        if learner.rank == 1:
            with torch.no_grad():
                learner.model.head.bias[0] = torch.nan
        learner.follower.average_()

    learners = free("gossip", 3, work, lr=0.1)
    assert all(bool(learner.follower.vector.read().isfinite().all()) for learner in learners)
    assert torch.equal(learners[0].follower.vector.read(), learners[1].follower.vector.read())


def test_who_dies_after_its_last_exchange_is_missed_and_named(caplog: pytest.LogCaptureFixture) -> None:
    def start(transport: InProcess) -> Learner:
        box = open_mailbox(transport, 1.0, 60.0)
        return Learner("gossip", box.rank, lambda m, o, s: Follower(policy_for(m, o, s, box)), 0.1)

    *others, dies = in_process(3, start)
    dies.follower.close()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(learner.follower.average_) for learner in others]:
            done.result(30)
    assert all(learner.follower.stats().lost == {2: "rank 2 is gone"} for learner in others)
    assert caplog.text.count("rank 2 is gone; going on without it") == 2
    for learner in others:
        learner.follower.close()


def test_a_rank_that_had_died_goes_on_from_its_model() -> None:
    first, second = local_mailboxes(2)
    saved = learner_at(first, "gossip", 0.1).follower.state_dict() | {"step": 7}
    late = learner_at(second, "gossip", 0.1)
    late.follower.load_state_dict([saved])
    assert late.follower.state_dict()["step"] == 7
    with pytest.raises(StateError, match="no state of rank 1"):
        late.follower.load_state_dict(saved)


def test_counts_after_a_resume_are_of_the_steps_since() -> None:
    (box,) = local_mailboxes(1)
    learner = learner_at(box, "gossip", 0.1)
    learner.follower.load_state_dict(learner.follower.state_dict() | {"step": 100})
    assert learner.follower.stats().dense_bytes_out == 0 and learner.follower.stats().steps_here == 1


def test_who_is_closed_says_so() -> None:
    (box,) = local_mailboxes(1)
    learner = learner_at(box, "gossip", 0.1)
    learner.follower.close()
    for call in (learner.follower.step, learner.follower.average_):
        with pytest.raises(StateError, match="before close"):
            call()
