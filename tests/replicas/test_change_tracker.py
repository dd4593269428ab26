"""When a worker of a gossip speaks, and of which groups."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from laconic.replicas.change_tracker import ChangeTracker
from laconic.replicas.vector import ModelVector, Subset
from laconic.trigger import Change, EveryStep, GossipTrigger, Period, TargetRate
from tests.gossiping import Small


def _tracker(trigger: GossipTrigger, model: nn.Module, rank: int = 0) -> tuple[ChangeTracker, ModelVector]:
    vector = ModelVector(model, trigger.per)
    return ChangeTracker(trigger, vector, 0, rank), vector


def _said(
    trigger: GossipTrigger, steps: int, rates: list[float] | None = None
) -> tuple[list[list[int]], ChangeTracker]:
    """What a model that takes steps of a random direction says; each thing said is exchanged at once."""
    torch.manual_seed(0)
    model = Small()
    tracker, vector = _tracker(trigger, model)
    said = []
    for step in range(steps):
        lr = rates[step] if rates else 1.0
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.001 * lr)
        groups = tracker.wants(step, lr, patiently=True)
        tracker.note_sent_(Subset(vector, groups).num_entries)
        tracker.note_exchanged_(groups, vector.sample)
        said.append(groups)
    return said, tracker


def test_every_step_and_every_nth() -> None:
    assert all(groups == [0] for groups in _said(EveryStep(), 5)[0])
    for steps in (1, 3, 7.5):
        said = [bool(groups) for groups in _said(Period(steps=steps), 60)[0]]
        assert abs(sum(said) - 60 / steps) <= 1
        gaps = [b - a for a, b in itertools.pairwise([t for t, spoke in enumerate(said) if spoke])]
        assert all(abs(gap - steps) < 1 for gap in gaps)
    first = {_first_turn(rank) for rank in range(8)}
    assert len(first) > 3  # not all workers speak at once


def _first_turn(rank: int) -> int:
    tracker, _ = _tracker(Period(steps=20), Small(), rank)
    return next(t for t in range(21) if tracker.wants(t, 1.0, patiently=True))


@pytest.mark.parametrize("per", ["model", "tensor"])
def test_change_speaks_when_the_model_has_moved_by_the_threshold(per: str) -> None:
    """Looking rarely finds the same step as looking always, to a tenth of the way on average; and never before."""
    torch.manual_seed(0)
    model = Small()
    tracker, vector = _tracker(Change(threshold=0.05, per=per, longest=1000), model)
    last = vector.read()
    spoke = dict.fromkeys(range(len(vector.groups)), -1)
    late = []
    over: dict[int, int] = {}
    for step in range(300):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.001)
        now = vector.read()
        for k, group in enumerate(vector.groups):
            moved = (now[group.trained] - last[group.trained]).norm() / last[group.trained].norm()
            if moved > 0.05:
                over.setdefault(k, step)
        for k in (said := tracker.wants(step, 1.0, patiently=True)):
            assert k in over, "it spoke before it had moved so far"
            late.append((step - over.pop(k)) / (step - spoke[k]))
            spoke[k] = step
            group = vector.groups[k]
            last[group.start : group.stop] = now[group.start : group.stop]
        tracker.note_exchanged_(said, vector.sample)
    # Half of the foretold way is slept through, and a few entries may go it faster than foretold.
    assert late and max(late) <= 0.6 and sum(late) / len(late) < 0.1
    assert tracker.passes < 200  # of 300 steps


def test_change_follows_the_learning_rate() -> None:
    """A model that moves as its learning rate does speaks as often at a hundredth of it; without the factor never."""
    rates = [1.0] * 200 + [0.01] * 200
    said, _ = _said(Change(threshold=0.02, longest=1000), 400, rates)
    early, late = (sum(map(bool, part)) for part in (said[20:200], said[220:]))
    assert early > 4 and 0.6 < late / early < 1.7


def test_shortest_longest_and_warm_up() -> None:
    said, _ = _said(Change(threshold=1e-6, shortest=4), 60)
    assert [t for t, groups in enumerate(said) if groups] == list(range(3, 60, 4))
    said, _ = _said(Change(threshold=1e6, longest=10, warmup=3), 33)
    assert [t for t, groups in enumerate(said) if groups] == [0, 1, 2, 12, 22, 32]


@pytest.mark.parametrize("per", ["model", "tensor"])
@pytest.mark.parametrize("rate", [0.3, 0.05])
def test_a_target_rate_is_held_while_the_learning_rate_falls(rate: float, per: str) -> None:
    steps = 600
    rates = [0.5 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)]
    said, tracker = _said(TargetRate(rate=rate, per=per), steps, rates)
    vector = ModelVector(Small(), per)
    half = [
        sum(Subset(vector, groups).num_entries for groups in part) / vector.num_entries / len(part)
        for part in (said[100:350], said[350:])
    ]
    assert all(0.7 * rate < found < 1.4 * rate for found in half), half
    assert tracker.passes < steps  # the large tensor, which is most of the model, is looked at rarely


@pytest.mark.parametrize("per", ["model", "tensor"])
@pytest.mark.parametrize("rate", [0.08, 0.3])
def test_a_target_rate_is_met_in_a_short_run_that_warms_up(rate: float, per: str) -> None:
    """A rising learning rate and a momentum that gathers make the first exchanges come early; later ones pay back."""
    torch.manual_seed(0)
    model = Small()
    tracker, vector = _tracker(TargetRate(rate=rate, per=per), model)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    sent = []
    for step in range(150):
        lr = min(1.0, (step + 1) / 8)
        with torch.no_grad():
            for p, v in zip(model.parameters(), velocity, strict=True):
                p.add_(v.mul_(0.9).add_(torch.randn_like(p)), alpha=0.001 * lr)
        groups = tracker.wants(step, lr, patiently=True)
        sent.append(Subset(vector, groups).num_entries / vector.num_entries)
        tracker.note_sent_(Subset(vector, groups).num_entries)
        tracker.note_exchanged_(groups, vector.sample)
    assert sum(sent) / 150 == pytest.approx(rate, rel=0.15)  # 12 models of one group: one more is 8 %
    assert sum(sent[:30]) / 30 < 3 * rate


def test_a_warm_up_leaves_a_target_rate_as_it_is() -> None:
    said, _ = _said(TargetRate(rate=0.3, warmup=20), 100)
    assert all(len(groups) == len(said[0]) for groups in said[:20])
    assert sum(map(bool, said[20:60])) > 5


def test_a_bar_does_not_fall_while_nothing_can_be_sent() -> None:
    model = Small()
    tracker, _ = _tracker(TargetRate(rate=0.5), model)
    assert tracker.wants(0, 0.0, patiently=True) == []
    assert tracker.state_dict()["threshold"] is None  # nothing has moved yet
    with torch.no_grad():
        model.body.weight.add_(1.0)
    tracker.wants(0, 1.0, patiently=True)
    bars = []
    for step in range(1, 40):
        tracker.wants(step, 1.0, patiently=True, held_up=step > 20)
        bars.append(tracker.state_dict()["threshold"])
    assert bars[18] < bars[0] and bars[19:] == [bars[19]] * len(bars[19:])


def test_small_tensors_speak_more_often_under_a_target_rate() -> None:
    said, _ = _said(TargetRate(rate=0.05), 300)
    vector = ModelVector(Small(), "tensor")
    count = {group.num_entries: sum(k in groups for groups in said) for k, group in enumerate(vector.groups)}
    assert count[5] > count[200] > count[1200] > 0
