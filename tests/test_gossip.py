"""Gossip: who talks to whom, when, and that the sum over all models is unchanged whatever the delays."""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time

import pytest
import torch
from torch import Tensor, nn

from gossiping import Learner, Small, free, learner_at, matched
from laconic import Follower, GossipScheme, Scheme, SchemeError, StateError, attach, follow, layout, parse
from laconic.errors import FrameError
from laconic.exchange import AllReduce, Gossip, check_peers, matching, neighbours, pick
from laconic.exchange.peers import GRAPHS
from laconic.gossip.free import Free
from laconic.gossip.grace import Grace
from laconic.gossip.letter import Letters, refusal
from laconic.gossip.paired import Paired
from laconic.gossip.remainders import Remainders
from laconic.gossip.unsaid import Unsaid
from laconic.gossip.vector import ModelVector
from laconic.gossip.watch import Watch
from laconic.quantize import Residue, steps_of
from laconic.select import TopK
from laconic.transport import QUESTION_HEAD_BYTES, InProcess, in_process, local_mailboxes
from laconic.trigger import Change, EveryStep, Period, TargetRate
from parts import gossip_texts

LIST = "0-1+1-2+2-3+3-4+4-5+5-6+6-7"
FREE = [text for text in gossip_texts() if "mode=matched" not in text]
MATCHED = [text for text in gossip_texts() if "mode=matched" in text]


# Who talks to whom


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("peers", GRAPHS)
def test_neighbours_know_each_other_and_reach_everyone(peers: str, num_workers: int) -> None:
    check_peers(peers, num_workers)
    for rank in range(num_workers):
        for peer in neighbours(peers, rank, num_workers):
            assert peer != rank and rank in neighbours(peers, peer, num_workers)
    at_most = {"uniform": num_workers - 1, "ring": 2, "exponential": 2 * math.ceil(math.log2(num_workers or 1))}
    assert all(len(neighbours(peers, rank, num_workers)) <= at_most[peers] for rank in range(num_workers))


@pytest.mark.parametrize("peers,num_workers", [*itertools.product(GRAPHS, [1, 2, 5, 8]), (LIST, 8)])
def test_a_matching_is_made_of_disjoint_pairs_of_neighbours(peers: str, num_workers: int) -> None:
    met = set()
    for step in range(60):
        partner = matching(peers, 3, step, num_workers)
        assert partner == matching(peers, 3, step, num_workers)
        assert all(partner[partner[rank]] == rank for rank in range(num_workers))
        pairs = {(a, b) for a, b in enumerate(partner) if a != b}
        assert all(b in neighbours(peers, a, num_workers) for a, b in pairs)
        alone = [rank for rank in range(num_workers) if partner[rank] == rank]
        assert not any(b in neighbours(peers, a, num_workers) for a, b in itertools.combinations(alone, 2))
        met |= pairs
    assert met == {(a, b) for a in range(num_workers) for b in neighbours(peers, a, num_workers)}


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16])
def test_workers_at_the_corners_of_a_hypercube_agree_after_all_its_directions(num_workers: int) -> None:
    models = torch.randn(num_workers, 5, dtype=torch.float64)
    mean = models.mean(0)
    num_directions = num_workers.bit_length() - 1
    seen = set()
    for turn in range(3 * num_directions, 4 * num_directions):
        partner = matching("uniform", 2, turn, num_workers)
        models = (models + models[partner]) / 2
        seen.add(tuple(partner))
    assert torch.allclose(models, mean.expand_as(models), atol=1e-12)  # a few roundings of float64
    assert len(seen) == num_directions
    assert num_workers < 4 or matching("uniform", 2, 0, num_workers) != matching(
        "uniform", 2, 3 * num_directions, num_workers
    )


def test_a_pick_is_even_and_depends_on_seed_step_and_rank_alone() -> None:
    picked = [pick({1, 4, 6}, 7, step, 2) for step in range(3000)]
    assert picked == [pick([6, 1, 4], 7, step, 2) for step in range(3000)]
    # 1,000 expected of each; the deviation of such a count is 26.
    assert all(abs(picked.count(peer) - 1000) < 130 for peer in (1, 4, 6))
    assert picked != [pick({1, 4, 6}, 8, step, 2) for step in range(3000)]
    assert picked != [pick({1, 4, 6}, 7, step, 3) for step in range(3000)]
    assert pick([], 0, 0, 0) is None


def test_a_wrong_list_of_peers_says_what_to_write() -> None:
    for text, cure in {"0-1+2": "like 0-1+1-2", "0-0": "like 0-1+1-2", "star": "uniform, ring, exponential"}.items():
        with pytest.raises(SchemeError, match=cure.replace("+", r"\+")):
            parse(f"gossip:peers={text}")
    with pytest.raises(SchemeError, match="ranks are 0 to 2"):
        check_peers("0-1+1-3", 3)
    with pytest.raises(SchemeError, match="to rank 2; add a pair"):
        check_peers("0-1+2-3", 4)


# When


def _watch(trigger: EveryStep | Period | Change | TargetRate, model: nn.Module, rank: int = 0) -> Watch:
    return Watch(trigger, ModelVector(model, getattr(trigger, "per", "model")), 0, rank)


def _said(
    trigger: EveryStep | Period | Change | TargetRate, steps: int, rates: list[float] | None = None
) -> tuple[list[list[int]], Watch]:
    """What a model that takes steps of a random direction says; each thing said is exchanged at once."""
    torch.manual_seed(0)
    model = Small()
    watch, said = _watch(trigger, model), []
    for step in range(steps):
        lr = rates[step] if rates else 1.0
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.001 * lr)
        groups = watch.wants(step, lr, patiently=True)
        watch.sent(watch._vector.count(groups))
        watch.exchanged(groups)
        said.append(groups)
    return said, watch


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
    watch = _watch(Period(steps=20), Small(), rank)
    return next(t for t in range(21) if watch.wants(t, 1.0, patiently=True))


@pytest.mark.parametrize("per", ["model", "tensor"])
def test_change_speaks_when_the_model_has_moved_by_the_threshold(per: str) -> None:
    """Looking rarely finds the same step as looking always, to a tenth of the way on average; and never before."""
    torch.manual_seed(0)
    model = Small()
    vector = ModelVector(model, per)
    watch, last = _watch(Change(threshold=0.05, per=per, longest=1000), model), vector.read()
    spoke, late = dict.fromkeys(range(len(vector.groups)), -1), []
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
        for k in (said := watch.wants(step, 1.0, patiently=True)):
            assert k in over, "it spoke before it had moved so far"
            late.append((step - over.pop(k)) / (step - spoke[k]))
            spoke[k] = step
            group = vector.groups[k]
            last[group.start : group.stop] = now[group.start : group.stop]
        watch.exchanged(said)
    # Half of the foretold way is slept through, and a few entries may go it faster than foretold.
    assert late and max(late) <= 0.6 and sum(late) / len(late) < 0.1
    assert watch.passes < 200  # of 300 steps


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
    said, watch = _said(TargetRate(rate=rate, per=per), steps, rates)
    vector = ModelVector(Small(), per)
    half = [
        sum(vector.count(groups) for groups in part) / vector.num_entries / len(part)
        for part in (said[100:350], said[350:])
    ]
    assert all(0.7 * rate < found < 1.4 * rate for found in half), half
    assert watch.passes < steps  # the large tensor, which is most of the model, is looked at rarely


def test_a_bar_does_not_fall_while_nothing_can_be_sent() -> None:
    model = Small()
    watch = _watch(TargetRate(rate=0.5), model)
    assert watch.wants(0, 0.0, patiently=True) == []
    assert watch.state_dict()["bar"] is None  # nothing has moved yet
    with torch.no_grad():
        model.body.weight.add_(1.0)
    watch.wants(0, 1.0, patiently=True)
    bars = []
    for step in range(1, 40):
        watch.wants(step, 1.0, patiently=True, held_up=step > 20)
        bars.append(watch.state_dict()["bar"])
    assert bars[18] < bars[0] and bars[19:] == [bars[19]] * len(bars[19:])


def test_small_tensors_speak_more_often_under_a_target_rate() -> None:
    said, _ = _said(TargetRate(rate=0.05), 300)
    vector = ModelVector(Small(), "tensor")
    count = {group.num_entries: sum(k in groups for groups in said) for k, group in enumerate(vector.groups)}
    assert count[5] > count[200] > count[1200] > 0


# What travels


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
    before, groups = vector.read(), [1, 4]
    vector.add_(vector.spread(groups, torch.ones(vector.count(groups))), groups)
    moved = vector.read() - before
    assert torch.equal(vector.cut(moved, groups).round(), torch.ones(vector.count(groups)))
    assert int(moved.round().sum()) == vector.count(groups)
    vector.write_(before)
    assert torch.equal(vector.read(), before)


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest model is exchanged in halves."""
    monkeypatch.setattr(layout, "WORTH_HALVING", 2)


def test_halves_may_end_amid_a_tensor_however_it_lies(halved: None) -> None:
    torch.manual_seed(1)
    model = nn.Conv2d(4, 8, 3)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    vector = ModelVector(model, "half")
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert [(group.start, group.stop) for group in vector.groups] == [(0, 148), (148, 296)]
    assert torch.equal(vector.read(), whole)
    assert torch.equal(vector.read([0]), whole[:148]) and torch.equal(vector.read([1]), whole[148:])
    vector.add_(vector.spread([1], torch.ones(148)), [1])
    assert torch.equal(vector.read(), whole + torch.cat([torch.zeros(148), torch.ones(148)]))
    vector.add_(torch.ones(296), [0, 1])  # a tensor in both is added to once
    assert torch.equal(vector.read([0]), whole[:148] + 1)
    assert len(ModelVector(nn.Linear(1, 1, bias=False), "half").groups) == 1


def _unsaid(text: str, model: nn.Module) -> tuple[ModelVector, Unsaid, Letters]:
    scheme = parse(text)
    assert isinstance(scheme, GossipScheme) and isinstance(scheme.select, TopK)
    assert not isinstance(scheme.quantize, Residue)
    vector = ModelVector(model, "model", scheme.select.dense_below)
    unsaid = Unsaid(scheme.select, vector, 4)
    return vector, unsaid, Letters(vector, scheme.quantize, unsaid)


def test_what_changed_most_is_said_and_the_rest_keeps_its_change() -> None:
    torch.manual_seed(2)
    model = Small()
    vector, unsaid, _ = _unsaid("gossip:rho=0.1", model)
    whole, k = 40 + 40 + 40 + 80 + 205, 120  # all small tensors and buffers, and a tenth of the one large one
    assert (unsaid.num_whole, unsaid.k) == (whole, k) and vector.chosen == slice(325, 1525)
    left = torch.zeros(1200)
    for _ in range(3):
        with torch.no_grad():
            model.body.weight.add_(torch.randn_like(model.body.weight))
        now = vector.read()
        positions, values = unsaid.choose_(now.clone())
        torch.testing.assert_close(values, now[positions], rtol=0, atol=1e-6)  # last + (x - last): two roundings
        change = (now - unsaid.last)[vector.chosen]
        said = positions[whole:] - vector.chosen.start
        assert torch.equal(said, change.abs().topk(k).indices.sort().values)
        assert len(set(positions.tolist())) == whole + k
        assert change.abs().sum() > left.abs().sum()  # what was left before is in it
        unsaid.exchanged(positions, now[positions])
        left = (now - unsaid.last)[vector.chosen]
        assert int((left == 0).sum()) == k and not (now - unsaid.last)[positions].any()


@pytest.mark.parametrize("quantize", ["none", "bf16"])
def test_a_letter_about_entries_is_read_as_it_was_written(quantize: str) -> None:
    torch.manual_seed(2)
    model = Small()
    vector, unsaid, letters = _unsaid(f"gossip:rho=0.1,quantize={quantize}", model)
    with torch.no_grad():
        model.body.weight.add_(torch.randn_like(model.body.weight))
    positions, _ = unsaid.choose_(vector.read())
    letter = letters.ask(positions, vector.read(positions))
    about, values = letters.open(letter.message, 1)
    assert isinstance(about, Tensor) and torch.equal(about, positions) and torch.equal(values, letter.values)
    answer = letters.answer(positions, vector.read(positions))
    assert answer.message.numel() == letters.answer_bytes(positions) < letter.message.numel()
    assert torch.equal(letters.read_answer(positions, answer.message, 1), letter.values)
    assert letter.message.numel() == letters.question_bytes([0])
    letter.message[-5] += 1
    for wrong in (letter.message, letter.message[:-4], letter.message[:20]):
        with pytest.raises(FrameError, match="rank 1"):
            letters.open(wrong.clone(), 1)
    with pytest.raises(FrameError, match="nothing of a letter was taken"):
        letters.read_answer(positions, refusal(answer.message.numel()), 1)


# Remainders


def _alike(model: nn.Module, seed: int, scale: float) -> Remainders:
    """Remainders of a model that is `scale` times a random vector away from the one given."""
    torch.manual_seed(seed)
    near = copy.deepcopy(model)
    remainders = Remainders(ModelVector(near, "model"), Residue(bits=5), 0, seed)
    with torch.no_grad():
        for p in near.parameters():
            p.add_(torch.randn_like(p), alpha=scale)
    return remainders


def test_two_that_tell_remainders_meet_in_the_middle_and_learn_how_far_they_were_apart() -> None:
    model, topic = Small(), [0]
    one, other = _alike(model, 1, 0.002), _alike(model, 2, 0.002)
    apart = []
    for turn in range(40):
        x, y = one._vector.read(), other._vector.read()
        apart.append(float((x - y).norm()))
        question = one.ask(topic, x)
        about, told = other.open(question.message, 0)
        answer, back = other.reply(told, about, y)
        way = one.settle(topic, question, answer, 1)
        assert back is not None and torch.equal(way, -back)
        assert answer.numel() == one.answer_bytes(topic) < 0.2 * 4 * x.numel() + 100
        assert torch.equal(one.reach[0], other.reach[0]) or turn == 0
        one._vector.write_(x + way)
        other._vector.write_(y + back)
    assert apart[1] < 0.3 * apart[0] and apart[-1] < 1e-3 * apart[0]  # what is not there to be seen fades by a fifth


def test_models_too_far_apart_for_their_remainders_stay_and_reach_further_until_they_meet() -> None:
    model = Small()
    one, other = _alike(model, 1, 0.001), _alike(model, 2, 0.001)
    one.reach[0].fill_(1e-5)
    one.last.copy_(one._vector.read())
    x, y = one._vector.read(), other._vector.read()
    missed = []
    for _ in range(12):
        question = one.ask([0], x)
        answer, back = other.reply(other.open(question.message, 0)[1], [0], y)
        way = one.settle([0], question, answer, 1)
        assert back is not None and torch.equal(way, -back)
        missed.append(float((way[:1525] == 0).float().mean()))
    assert missed[0] == 1 and missed[-1] < 0.2
    step = steps_of(question.told.exponents).repeat_interleave(256)[: x.numel()]
    assert torch.all(((x - y + 2 * way).abs() <= 2 * step) | (2 * way.abs() == 7 * step))  # what is further is cut


@pytest.mark.parametrize("worth_halving", [2, 10_000])
def test_letters_of_remainders_are_as_long_as_foretold(worth_halving: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "WORTH_HALVING", worth_halving)
    scheme, vector = parse("gossip:rate=1"), ModelVector(nn.Linear(61, 19), "half")
    assert isinstance(scheme, GossipScheme) and isinstance(scheme.quantize, Residue)
    letters = Remainders(vector, scheme.quantize, 0, 0)
    parts = [[k] for k in range(len(vector.groups))]
    exchange = sum(QUESTION_HEAD_BYTES + letters.question_bytes(k) + letters.answer_bytes(k) for k in parts)
    assert scheme.bytes_out(vector.layout, 4) == exchange / 2
    assert scheme.bytes_out(vector.layout, 5) == round(0.8 * exchange / 2)  # one of five has no partner


def test_a_question_about_a_half_names_it(halved: None) -> None:
    torch.manual_seed(1)
    model = nn.Linear(61, 19)  # halves of 589 entries each: nothing but its name tells one from the other
    one, other = (Remainders(ModelVector(copy.deepcopy(model), "half"), Residue(), 0, rank) for rank in range(2))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=1e-4)
    other._vector.write_(ModelVector(model, "half").read())
    for k in (1, 0):
        question = one.ask([k], one._vector.read([k]))
        topic, told = other.open(question.message, 0)
        assert topic == [k]
        answer, back = other.reply(told, topic, other._vector.read(topic))
        way = one.settle([k], question, answer, 1)
        assert back is not None and torch.equal(way, -back) and bool(way.any())
        with pytest.raises(FrameError, match=f"bucket is {k}, not {1 - k}"):
            one.settle([1 - k], question, answer, 1)
    stranger = Remainders(ModelVector(Small(), "tensor"), Residue(), 0, 2)
    with pytest.raises(FrameError, match="rank 2 asked about part 5 of 2"):
        one.open(stranger.ask([5], stranger._vector.read([5])).message, 2)
    with pytest.raises(FrameError, match="part -1"):
        one.open(torch.zeros(8, dtype=torch.uint8), 2)


def test_a_letter_of_remainders_that_is_not_one_is_refused() -> None:
    remainders = _alike(Small(), 1, 0.01)
    values = remainders._vector.read()
    question = remainders.ask([0], values)
    damaged = question.message.clone()
    damaged[60] += 1
    for wrong, why in {
        damaged: "check sum",
        question.message[:-4]: "bytes",
        refusal(question.message.numel()): "taken",
    }.items():
        with pytest.raises(FrameError, match=why):
            remainders.open(wrong, 3)
    later, (earlier, _) = remainders.ask([0], values), remainders.reply(question.told, [0], values)
    with pytest.raises(FrameError, match="rank 3 answered another question"):
        remainders.settle([0], later, earlier, 3)
    answer, way = remainders.reply(question.told, [0], torch.full_like(values, math.nan))
    assert way is None
    with pytest.raises(FrameError, match="not finite"):
        remainders.settle([0], question, answer, 3)


# In step


def _vectors(learners: list[Learner]) -> Tensor:
    return torch.stack([learner.follower.read() for learner in learners])


@pytest.mark.parametrize("text", MATCHED)
def test_a_matched_run_is_had_again_bit_for_bit(text: str) -> None:
    first, again = ([learner for learner, _ in matched(text, 4, 12)] for _ in range(2))
    assert torch.equal(_vectors(first), _vectors(again))
    assert [learner.follower.stats().bytes_out for learner in first] == [
        learner.follower.stats().bytes_out for learner in again
    ]


@pytest.mark.parametrize("text", MATCHED)
def test_frozen_matched_workers_keep_the_mean_of_all_models(text: str) -> None:
    def work(transport: InProcess) -> tuple[Tensor, Tensor]:
        learner = Learner(text, transport.rank, lambda m, o, s: Follower(m, o, s, transport), 0.1)
        learner.drift(0)
        before = learner.follower.read()
        for _ in range(20):
            learner.follower.step()
        return before, learner.follower.read()

    before, after = (torch.stack(rows).double() for rows in zip(*in_process(4, work), strict=True))
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=2e-6, rtol=0)  # float32 additions to values near 1


@pytest.mark.parametrize("text", MATCHED)
def test_matched_workers_learn_and_agree(text: str) -> None:
    results = matched(text, 4, 60)
    for _, losses in results:
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    models = _vectors([learner for learner, _ in results])
    spread = (models - models.mean(0)).norm() / models.mean(0).norm()
    assert spread < 0.5


@pytest.mark.parametrize("text", MATCHED)
def test_five_matched_steps_saved_and_five_more_are_ten(text: str) -> None:
    half = [learner for learner, _ in matched(text, 4, 5)]
    saved = [
        {
            "model": learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "follower": learner.follower.state_dict(),
        }
        for learner in half
    ]
    rest = [learner for learner, _ in matched(text, 4, 5, first=5, load=saved)]
    whole = [learner for learner, _ in matched(text, 4, 10)]
    assert torch.equal(_vectors(rest), _vectors(whole))
    assert rest[0].follower.state_dict().keys() == whole[0].follower.state_dict().keys()


# Without a barrier


@pytest.mark.parametrize(("text", "worth_halving"), [*((text, 10_000) for text in FREE), ("gossip", 2)])
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
        learner.follower._side.settle()

    learners = free(text, 5, work, lr=0.1, longest_delay_s=0.001)
    before, after = torch.stack([starts[r] for r in range(5)]), _vectors(learners)
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
    models = _vectors(learners)
    assert all(torch.equal(models[0], model) for model in models)
    assert all(sum(of[-5:]) < 0.5 * sum(of[:5]) for of in losses.values())
    assert "4 workers" in str(learners[0].follower.stats())


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
    models = _vectors(learners)
    assert torch.allclose(models, models[0].expand_as(models), atol=1e-6)  # roundings of three halvings, at most 2
    stats = [learner.follower.stats() for learner in learners]
    assert sum(each.asked for each in stats) == sum(each.answered for each in stats) == 6 * 4 * parts
    assert not any(each.late for each in stats)


def test_an_answer_that_does_not_come_keeps_a_worker_from_no_other_appointment(halved: None) -> None:
    boxes = local_mailboxes(4)
    scheme = "scheme:exchange=gossip(mode=paired,grace=1e6,patience=0.05)"
    learner, *_ = [learner_at(box, scheme, 0.0) for box in boxes]
    never = threading.Event()

    def stuck(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        never.wait()
        return refusal(num_bytes)

    boxes[3].listen(stuck)
    turns = range(16)
    side = learner.follower._side
    assert isinstance(side, Paired)
    for _ in turns:  # the others do not step, but answer
        learner.follower.step()
        while side._asking.keys() - {3}:  # who was waited for in vain is not waited for the next time
            time.sleep(0.001)
    asked = [matching("uniform", 0, t, 4)[0] for t in turns]
    assert {1, 2, 3} == set(asked)
    stats = learner.follower.stats()
    assert stats.asked == len([partner for partner in asked if partner != 3]) and stats.late == 1
    never.set()


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


def test_a_closed_peer_is_dropped_once_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
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
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("rank 2 is gone" in line and "going on without it" in line for line in said)


def test_who_is_waited_for_in_vain_is_not_waited_for_the_next_time() -> None:
    grace, never, now = Grace(Gossip()), threading.Event(), threading.Event()
    now.set()
    grace.left_s = 0.01
    grace.wait(1, [never])
    assert grace.tardy == {1} and grace.left_s <= 0
    grace.left_s = 1e9  # and here nothing waits
    grace.wait(1, [never])
    assert not grace.tardy
    grace.wait(1, [now])
    assert not grace.tardy


def test_what_exchanges_usually_take_is_waited_for_at_no_charge() -> None:
    grace, in_time, never = Grace(Gossip()), threading.Event(), threading.Event()
    for seconds in (2.0, 100.0) * 8:  # a slow neighbour, one of two, is not what is usual
        grace.exchanged(seconds)
    assert grace.usual_s == 4
    threading.Timer(0.05, in_time.set).start()
    grace.wait(1, [in_time])
    assert in_time.is_set() and not grace.tardy and grace.left_s == 0
    grace.usual_s = 0.05
    grace.wait(1, [never])
    assert grace.tardy == {1} and grace.left_s < -0.04  # what was waited for in vain is charged whole
    grace.tardy.clear()
    grace.usual_s = 1e9  # beyond the patience, so that it would be in vain
    grace.wait(1, [never])
    assert grace.tardy == {1}


@pytest.mark.parametrize("deed", ["ask", "reply"])
def test_what_fails_in_another_thread_ends_training(deed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be printed at every exchange, while models trained on alone."""
    side, other = (learner_at(box, "gossip", 0.1).follower._side for box in local_mailboxes(2))
    failing = side if deed == "ask" else other
    assert isinstance(side, Free) and isinstance(failing, Free)
    monkeypatch.setattr(failing._letters, deed, lambda *_: 1 / 0)
    assert side._begin(1, 0, list(range(len(side._vector.groups)))).wait(60)
    with pytest.raises(ZeroDivisionError):
        for _ in range(1000):  # the thread notes it when it can
            failing.step(0, 0.1)
            time.sleep(0.001)


@pytest.mark.parametrize("text", ["gossip-every", "gossip:trigger=every-step"])
def test_a_model_that_is_not_finite_is_not_taken_in(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    boxes = local_mailboxes(2)
    learners = [learner_at(box, text, 0.1) for box in boxes]
    with torch.no_grad():
        next(learners[1].model.parameters())[0] = torch.nan
    for learner in learners:
        learner.follower.step()
        learner.follower._side.close()
    assert torch.isfinite(learners[0].follower.read()).all()
    assert sum(learner.follower.stats().refused for learner in learners) >= 2
    assert "not finite" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["gossip:mode=matched", "gossip:mode=matched,rho=0.2", "gossip-every:mode=matched"])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_in_step_a_model_that_is_not_finite_ends_both(text: str, spoilt: int) -> None:
    def work(transport: InProcess) -> str:
        learner = Learner(text + ",seed=2", transport.rank, lambda m, o, s: Follower(m, o, s, transport), 0.1)
        if transport.rank == spoilt:
            next(learner.model.parameters()).data[0] = torch.nan
        try:
            for _ in range(4):
                learner.follower.step()
        except FrameError as error:
            return str(error)
        return ""

    whys = in_process(2, work)
    assert all("not finite" in why or f"rank {spoilt} sent no question" in why for why in whys)
    assert f"rank {spoilt}" in whys[spoilt] or f"rank {spoilt}" in whys[1 - spoilt]


def test_the_state_of_both_halves_is_saved(halved: None) -> None:
    boxes = local_mailboxes(2)
    learners = [learner_at(box, "gossip:rate=1", 0.1) for box in boxes]
    for number in range(6):
        for learner in learners:
            learner.step(number)
    kept = learners[0].follower._remainders
    later = learner_at(local_mailboxes(2)[0], "gossip:rate=1", 0.1).follower
    later.load_state_dict(learners[0].follower.state_dict())
    assert kept is not None and later._remainders is not None and len(kept.reach) == 2
    assert all(torch.equal(new, old) for new, old in zip(later._remainders.reach, kept.reach, strict=True))
    assert torch.equal(later._remainders.last, kept.last) and any(bool(reach.any()) for reach in kept.reach)


def test_states_are_checked() -> None:
    box = local_mailboxes(1)[0]
    learner = learner_at(box, "gossip", 0.1)
    saved = learner.follower.state_dict()
    learner.follower.load_state_dict(saved)
    with pytest.raises(StateError, match="same number of workers"):
        learner.follower.load_state_dict({**saved, "num_workers": 3})
    with pytest.raises(StateError, match="another model"):
        learner.follower.load_state_dict({**saved, "groups": [5]})
    with pytest.raises(StateError, match=r"the state is of gossip:rho=0\.2; resume with that scheme"):
        learner.follower.load_state_dict(learner_at(box, "gossip:rho=0.2", 0.1).follower.state_dict())
    with pytest.raises(StateError, match="no state of a follower"):
        learner.follower.load_state_dict({"format": 1})


def test_gossip_is_followed_not_attached() -> None:
    model = Small()
    with pytest.raises(SchemeError, match=r"use laconic.follow\(model, optimizer, scheme\)"):
        attach(model, "gossip")  # type: ignore[arg-type]
    with pytest.raises(SchemeError, match=r"use laconic.attach"):
        follow(model, torch.optim.SGD(model.parameters(), lr=0.1), "dense")
    with pytest.raises(SchemeError, match=r"init_process_group\(\) first"):
        follow(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_wrong_compositions_name_their_cure() -> None:
    for text, cure in {
        "scheme:exchange=gossip,trigger=warm-up(steps=3)": "TargetRate",
        "scheme:trigger=period(steps=3)": "EveryStep",
        "scheme:exchange=gossip,select=topk(rho=0.1),memory=none": "use Residual",
        "scheme:exchange=gossip,select=randk(rho=0.1)": r"use AllReduce\(\)",
        "scheme:exchange=gossip,select=overlap(rho=0.1)": r"use Server\(\)",
        "scheme:exchange=gossip,memory=residual": "use Nothing",
        "scheme:exchange=gossip,quantize=sign": "use BF16",
        "gossip:trigger=target-rate(rate=0.1)": "per='model'",
        "gossip:rho=0.2,trigger=target-rate(rate=0.1)": "per='model'",
        "gossip:rho=0.2,quantize=residue": "use BF16",
        "gossip:quantize=residue(bits=9)": "3 to 8",
        "scheme:quantize=residue": "use Gossip",
        "scheme:exchange=gossip(grace=-1)": "0 to wait for nobody",
        "gossip:mode=fast": "free, paired, wait, matched",
        "gossip:rate=0": r"in \(0, 2\]",
        "gossip:trigger=change(per=layer)": "model or tensor",
        "gossip-period:steps=0.5": "only pairs meet more than once a step",
        "gossip-period:steps=0.01": "0.1 or more",
        "gossip:mode=paired,trigger=change": "pairs meet by the clock",
    }.items():
        with pytest.raises(SchemeError, match=cure):
            parse(text)


def test_models_have_a_scheme_of_their_own_kind() -> None:
    with pytest.raises(SchemeError, match=r"use GossipScheme\(\.\.\.\), or laconic.parse\('gossip'\)"):
        Scheme(exchange=Gossip())
    with pytest.raises(SchemeError, match=r"AllReduce is for gradients, and gossip sends models; use Gossip\(\)"):
        GossipScheme(exchange=AllReduce())  # type: ignore[arg-type]
    scheme = parse("scheme:exchange=gossip(seed=3),select=topk(rho=0.1)")
    assert scheme == GossipScheme(select=TopK(rho=0.1), exchange=Gossip(seed=3))
    assert str(scheme) == "scheme:select=topk(rho=0.1),quantize=none,exchange=gossip(seed=3),trigger=every-step"


def test_texts_that_name_a_memory_go_on_parsing() -> None:
    """Versions before had to say what is kept, though the other answers decide it."""
    for text, memory in {
        "scheme:exchange=gossip": "none",
        "scheme:exchange=gossip,select=topk(rho=0.1)": "residual",
    }.items():
        assert parse(f"{text},memory={memory}") == parse(text)
