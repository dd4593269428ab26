"""The messages of a gossip: whole groups, the entries that changed most, and modulo codes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from laconic import GossipScheme, layout, parse
from laconic.errors import FrameError
from laconic.quantize import BF16, ModuloCode, is_modulo_code, steps_of
from laconic.replicas.messages import EntryMessages, GroupMessages, MessageWriter, ModuloMessages, refusal
from laconic.replicas.vector import ModelVector
from laconic.transport import REQUEST_HEAD_BYTES
from laconic.wire import CodesShape, FrameShape
from tests.gossiping import Small


def _of_entries(text: str, model: nn.Module) -> tuple[ModelVector, EntryMessages]:
    scheme = parse(text)
    assert isinstance(scheme, GossipScheme) and not is_modulo_code(scheme.quantize)
    vector = ModelVector(model, "model", scheme.select.dense_below)
    return vector, EntryMessages(vector, scheme.quantize, scheme.select, 4)


@pytest.mark.parametrize("kind", ["groups", "entries", "remainders"])
def test_a_request_that_says_it_has_no_values_is_refused(kind: str) -> None:
    vector = ModelVector(Small(), "model")
    messages: MessageWriter
    if kind == "groups":
        messages = GroupMessages(vector, BF16())
        named = torch.tensor([1, 0, 0, 0], dtype=torch.uint8)
        shape: CodesShape = FrameShape(vector.num_entries, vector.num_entries, 0, BF16())
    elif kind == "entries":
        _, messages = _of_entries("gossip:rho=0.1", Small())
        named, shape = torch.empty(0, dtype=torch.uint8), messages.shape
    else:
        messages = ModuloMessages(vector, ModuloCode(), 0, 0)
        named, shape = torch.empty(0, dtype=torch.uint8), messages._request_shapes[0]
    request = torch.cat([named, shape.write_overflow(named.device, step=0, bucket=0)])
    assert request.numel() == messages.request_bytes([0])
    with pytest.raises(FrameError, match="the model of rank 3 is not finite"):
        messages.open(request, 3)


def test_what_changed_most_is_said_and_the_rest_keeps_its_change() -> None:
    torch.manual_seed(2)
    model = Small()
    vector, messages = _of_entries("gossip:rho=0.1,quantize=none", model)
    whole, k = 40 + 40 + 40 + 80 + 205, 120  # all small tensors and buffers, and a tenth of the one large one
    assert (messages.shape.num_fixed, messages.shape.k) == (whole, k) and vector.selectable == slice(325, 1525)
    left = torch.zeros(1200)
    for _ in range(3):
        with torch.no_grad():
            model.body.weight.add_(torch.randn_like(model.body.weight))
        now = vector.read()
        topic, values, _, _ = messages.request_(messages.subset([0]), now.clone())
        positions = topic.positions
        torch.testing.assert_close(values, now[positions], rtol=0, atol=1e-6)  # last + (x - last): two roundings
        change = (now - messages.last)[vector.selectable]
        said = positions[whole:] - vector.selectable.start
        assert torch.equal(said, change.abs().topk(k).indices.sort().values)
        assert len(set(positions.tolist())) == whole + k
        assert change.abs().sum() > left.abs().sum()  # what was left before is in it
        messages.reply_(topic, now[positions], now[positions])  # to one who has the same there
        left = (now - messages.last)[vector.selectable]
        assert int((left == 0).sum()) == k and not (now - messages.last)[positions].any()


@pytest.mark.parametrize("quantize", ["none", "bf16"])
def test_a_message_about_entries_is_read_as_it_was_written(quantize: str) -> None:
    torch.manual_seed(2)
    model = Small()
    vector, messages = _of_entries(f"gossip:rho=0.1,quantize={quantize}", model)
    with torch.no_grad():
        model.body.weight.add_(torch.randn_like(model.body.weight))
    request = messages.request_(messages.subset([0]), vector.read())
    about, values = messages.open(request.message, 1)
    assert torch.equal(about.positions, request.subset.positions) and torch.equal(values, request.decoded)
    answer, way = messages.reply_(about, values, request.values)
    assert answer.numel() == messages.reply_bytes([0]) < request.message.numel()
    assert way is not None and not way.any() and not messages.finish_(request, answer, 1).any()
    assert request.message.numel() == messages.request_bytes([0])
    request.message[-5] += 1
    for wrong in (request.message, request.message[:-4], request.message[:20]):
        with pytest.raises(FrameError, match="rank 1"):
            messages.open(wrong.clone(), 1)
    with pytest.raises(FrameError, match="nothing of a message was taken"):
        messages.finish_(request, refusal(answer.numel()), 1)


def _alike(model: nn.Module, seed: int, scale: float) -> tuple[ModuloMessages, ModelVector]:
    """Messages of a model that is `scale` times a random vector away from the one given."""
    torch.manual_seed(seed)
    near = copy.deepcopy(model)
    vector = ModelVector(near, "model")
    messages = ModuloMessages(vector, ModuloCode(bits=5), 0, seed)
    with torch.no_grad():
        for p in near.parameters():
            p.add_(torch.randn_like(p), alpha=scale)
    return messages, vector


def test_two_that_tell_remainders_meet_in_the_middle_and_learn_how_far_they_were_apart() -> None:
    model = Small()
    one, here = _alike(model, 1, 0.002)
    other, there = _alike(model, 2, 0.002)
    topic = one.subset([0])
    apart = []
    for turn in range(40):
        x, y = here.read(), there.read()
        apart.append(float((x - y).norm()))
        request = one.request_(topic, x)
        about, told = other.open(request.message, 0)
        answer, back = other.reply_(about, told, y)
        way = one.finish_(request, answer, 1)
        assert back is not None and torch.equal(way, -back)
        assert answer.numel() == one.reply_bytes([0]) < 0.2 * 4 * x.numel() + 100
        assert torch.equal(one.reach[0], other.reach[0]) or turn == 0
        here.write_(x + way)
        there.write_(y + back)
    assert apart[1] < 0.3 * apart[0] and apart[-1] < 1e-3 * apart[0]  # what is not there to be seen fades by a fifth


def test_models_too_far_apart_for_their_remainders_stay_and_reach_further_until_they_meet() -> None:
    model = Small()
    one, here = _alike(model, 1, 0.001)
    other, there = _alike(model, 2, 0.001)
    one.reach[0].fill_(1e-5)
    one.note_known_()
    x, y = here.read(), there.read()
    topic = one.subset([0])
    missed = []
    for _ in range(12):
        request = one.request_(topic, x)
        about, told = other.open(request.message, 0)
        answer, back = other.reply_(about, told, y)
        way = one.finish_(request, answer, 1)
        assert back is not None and torch.equal(way, -back)
        missed.append(float((way[:1525] == 0).float().mean()))
    assert missed[0] == 1 and missed[-1] < 0.2
    step = steps_of(request.decoded[0].exponents).repeat_interleave(256)[: x.numel()]
    assert torch.all(((x - y + 2 * way).abs() <= 2 * step) | (2 * way.abs() == 7 * step))  # what is further is cut


@pytest.mark.parametrize("worth_halving", [2, 10_000])
def test_messages_of_remainders_are_as_long_as_foretold(worth_halving: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "WORTH_HALVING", worth_halving)
    scheme, vector = parse("gossip:rate=1"), ModelVector(nn.Linear(61, 19), "half")
    assert isinstance(scheme, GossipScheme) and is_modulo_code(scheme.quantize)
    messages = ModuloMessages(vector, scheme.quantize, 0, 0)
    parts = [[k] for k in range(len(vector.groups))]
    exchange = sum(REQUEST_HEAD_BYTES + messages.request_bytes(k) + messages.reply_bytes(k) for k in parts)
    assert scheme.bytes_out(vector.layout, 4) == exchange / 2
    assert scheme.bytes_out(vector.layout, 5) == round(0.8 * exchange / 2)  # one of five has no partner


def test_a_request_about_a_half_names_it(halved: None) -> None:
    torch.manual_seed(1)
    model = nn.Linear(61, 19)  # halves of 589 entries each: nothing but its name tells one from the other
    here, there = (ModelVector(copy.deepcopy(model), "half") for _ in range(2))
    one, other = (ModuloMessages(vector, ModuloCode(), 0, rank) for rank, vector in enumerate((here, there)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=1e-4)
    there.write_(ModelVector(model, "half").read())
    for k in (1, 0):
        request = one.request_(one.subset([k]), one.subset([k]).read())
        topic, told = other.open(request.message, 0)
        assert topic.groups == [k]
        answer, back = other.reply_(topic, told, topic.read())
        way = one.finish_(request, answer, 1)
        assert back is not None and torch.equal(way, -back) and bool(way.any())
        with pytest.raises(FrameError, match=f"bucket is {k}, not {1 - k}"):
            one.finish_(request._replace(subset=one.subset([1 - k])), answer, 1)
    stranger = ModuloMessages(ModelVector(Small(), "tensor"), ModuloCode(), 0, 2)
    part = stranger.subset([5])
    with pytest.raises(FrameError, match="rank 2 asked about part 5 of 2"):
        one.open(stranger.request_(part, part.read()).message, 2)
    with pytest.raises(FrameError, match="part -1"):
        one.open(torch.zeros(8, dtype=torch.uint8), 2)


def test_a_message_of_remainders_is_about_several_tensors() -> None:
    torch.manual_seed(0)
    asking, replying = (ModuloMessages(ModelVector(Small(), "tensor"), ModuloCode(), 0, rank) for rank in range(2))
    groups = [0, 2, 3]
    request = asking.request_(asking.subset(groups), asking.subset(groups).read())
    assert request.message.numel() == asking.request_bytes(groups)
    topic, received = replying.open(request.message, 0)
    assert list(topic.groups) == groups
    answer, back = replying.reply_(topic, received, topic.read())
    assert answer.numel() == asking.reply_bytes(groups)
    update = asking.finish_(request, answer, 1)
    assert back is not None and torch.equal(update, -back) and update.numel() == topic.num_entries
    for wrong in (request.message[: asking.request_bytes([0]) + 4], request.message.repeat(2)):
        with pytest.raises(FrameError):
            replying.open(wrong, 0)


def test_a_message_of_remainders_that_is_not_one_is_refused() -> None:
    messages, vector = _alike(Small(), 1, 0.01)
    values = vector.read()
    topic = messages.subset([0])
    request = messages.request_(topic, values)
    damaged = request.message.clone()
    damaged[60] += 1
    for wrong, why in {
        damaged: "check sum",
        request.message[:-4]: "bytes",
        refusal(request.message.numel()): "taken",
    }.items():
        with pytest.raises(FrameError, match=why):
            messages.open(wrong, 3)
    later = messages.request_(topic, values)
    earlier, _ = messages.reply_(topic, request.decoded, values)
    with pytest.raises(FrameError, match="rank 3 answered another request"):
        messages.finish_(later, earlier, 3)
    answer, update = messages.reply_(topic, request.decoded, torch.full_like(values, math.nan))
    assert update is None
    with pytest.raises(FrameError, match="not finite"):
        messages.finish_(request, answer, 3)
