"""A model as one vector, and what an exchange is about."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.replicas.vector import ModelVector, PendingUpdate, Subset
from tests.gossiping import Small


def test_buffers_travel_with_the_weights_of_their_module() -> None:
    vector = ModelVector(Small(), "tensor")
    sizes = dict(zip([group.num_trained for group in vector.groups], vector.groups, strict=True))
    assert len(vector.groups) == 6 and vector.num_entries == 1200 + 40 + 80 + 80 + 205
    norm = next(group for group in vector.groups if group.num_entries == 120)
    assert norm.num_trained == 40 and sizes  # the weight, then running mean and variance
    assert len(ModelVector(Small(), "model").groups) == 1


def test_a_large_group_is_measured_by_a_sample() -> None:
    torch.manual_seed(0)
    model = nn.Linear(1500, 1500)
    vector = ModelVector(model, "tensor")
    before = [vector.sample(k) for k in range(2)]
    assert 65_536 <= before[0].numel() < 80_000 and before[1].numel() == 1500
    with torch.no_grad():
        model.weight.add_(torch.randn_like(model.weight), alpha=0.01)
    moved = (vector.sample(0) - before[0]).square().mean().sqrt()
    assert abs(moved / 0.01 - 1) < 0.01  # 66,000 draws: a deviation of 0.3 %


def test_a_vector_reads_and_adds_groups() -> None:
    torch.manual_seed(1)
    model = Small()
    vector = ModelVector(model, "tensor")
    before = vector.read()
    subset = Subset(vector, [1, 4])
    pending = PendingUpdate(vector)

    def inside(flat: Tensor) -> Tensor:
        return torch.cat([flat[vector.groups[k].start : vector.groups[k].stop] for k in subset.groups])

    pending.add_(subset, torch.ones(subset.num_entries))
    assert torch.equal(subset.read(pending), inside(before) + 1)
    assert torch.equal(Subset(vector, [0]).read(pending), before[: vector.groups[0].stop])  # nothing is pending there
    vector.move_(pending.whole, subset.groups)
    moved = vector.read() - before
    assert torch.equal(inside(moved).round(), torch.ones(subset.num_entries))
    assert int(moved.round().sum()) == subset.num_entries
    assert torch.equal(subset.read(), inside(vector.read()))
    vector.write_(before)
    assert torch.equal(vector.read(), before)


def test_halves_may_end_amid_a_tensor_however_it_lies(halved: None) -> None:
    torch.manual_seed(1)
    model = nn.Conv2d(4, 8, 3)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    vector = ModelVector(model, "half")
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert [(group.start, group.stop) for group in vector.groups] == [(0, 148), (148, 296)]
    assert torch.equal(vector.read(), whole)
    first, second = vector.groups
    assert torch.equal(vector.read(first), whole[:148]) and torch.equal(vector.read(second), whole[148:])
    vector.move_(torch.ones(296), [1])  # of which only what lies in that half
    assert torch.equal(vector.read(), whole + torch.cat([torch.zeros(148), torch.ones(148)]))
    vector.move_(torch.ones(296), [0, 1])  # a tensor in both is added to once
    assert torch.equal(vector.read(first), whole[:148] + 1)
    assert len(ModelVector(nn.Linear(1, 1, bias=False), "half").groups) == 1
