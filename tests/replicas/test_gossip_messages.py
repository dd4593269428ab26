"""Messages about the entries that changed most."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laconic import GossipScheme, parse
from laconic.errors import FrameError
from laconic.quantize import BF16, Residue, is_residue
from laconic.replicas.entry_messages import EntryMessages
from laconic.replicas.messages import GroupMessages, MessageWriter, refusal
from laconic.replicas.modulo_messages import ModuloMessages
from laconic.replicas.vector import ModelVector
from laconic.wire import CodesShape, FrameShape
from tests.gossiping import Small


def _of_entries(text: str, model: nn.Module) -> tuple[ModelVector, EntryMessages]:
    scheme = parse(text)
    assert isinstance(scheme, GossipScheme) and not is_residue(scheme.quantize)
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
        messages = ModuloMessages(vector, Residue(), 0, 0)
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
