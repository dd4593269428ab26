"""Gossip in step, the scheme of gossip, and the states that its followers take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic import GossipScheme, Scheme, SchemeError, StateError, attach, follow, parse
from laconic.errors import FrameError
from laconic.exchange import AllReduce, Gossip
from laconic.select import TopK
from laconic.transport import InProcess, in_process
from tests.gossiping import MATCHED_TEXTS, Learner, Small, followed, learner_at, matched, vectors_of
from tests.local_mailbox import local_mailboxes


@pytest.mark.parametrize("text", MATCHED_TEXTS)
def test_a_matched_run_is_had_again_bit_for_bit(text: str) -> None:
    first, again = ([learner for learner, _ in matched(text, 4, 12)] for _ in range(2))
    assert torch.equal(vectors_of(first), vectors_of(again))
    assert [learner.follower.stats().bytes_out for learner in first] == [
        learner.follower.stats().bytes_out for learner in again
    ]


@pytest.mark.parametrize("text", MATCHED_TEXTS)
def test_frozen_matched_workers_keep_the_mean_of_all_models(text: str) -> None:
    def work(transport: InProcess) -> tuple[Tensor, Tensor]:
        learner = Learner(text, transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        learner.drift(0)
        before = learner.follower.vector.read()
        for _ in range(20):
            learner.follower.step()
        return before, learner.follower.vector.read()

    before, after = (torch.stack(rows).double() for rows in zip(*in_process(4, work), strict=True))
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=2e-6, rtol=0)  # float32 additions to values near 1


@pytest.mark.parametrize("text", MATCHED_TEXTS)
def test_matched_workers_learn_and_agree(text: str) -> None:
    results = matched(text, 4, 60)
    for _, losses in results:
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    models = vectors_of([learner for learner, _ in results])
    spread = (models - models.mean(0)).norm() / models.mean(0).norm()
    assert spread < 0.5


@pytest.mark.parametrize("text", MATCHED_TEXTS)
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
    assert torch.equal(vectors_of(rest), vectors_of(whole))
    assert rest[0].follower.state_dict().keys() == whole[0].follower.state_dict().keys()


@pytest.mark.parametrize("text", ["gossip:mode=matched", "gossip:mode=matched,rho=0.2", "gossip-every:mode=matched"])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_in_step_a_model_that_is_not_finite_ends_both(text: str, spoilt: int) -> None:
    def work(transport: InProcess) -> str:
        learner = Learner(text + ",seed=2", transport.rank, lambda m, o, s: followed(m, o, s, transport), 0.1)
        if transport.rank == spoilt:
            next(learner.model.parameters()).data[0] = torch.nan
        try:
            for _ in range(4):
                learner.follower.step()
        except FrameError as error:
            return str(error)
        return ""

    whys = in_process(2, work)
    assert all("not finite" in why or f"rank {spoilt} sent no request" in why for why in whys)
    assert f"rank {spoilt}" in whys[spoilt] or f"rank {spoilt}" in whys[1 - spoilt]


def test_gossip_is_followed_not_attached() -> None:
    model = Small()
    with pytest.raises(SchemeError, match=r"takes an optimizer, not 'streaming'; write laconic.follow\(model, opt"):
        follow(torch.nn.Linear(4, 4), "streaming")  # type: ignore[arg-type]
    with pytest.raises(SchemeError, match=r"use laconic.follow\(model, optimizer, scheme\)"):
        attach(model, "gossip")
    with pytest.raises(SchemeError, match=r"use laconic.attach"):
        follow(model, torch.optim.SGD(model.parameters(), lr=0.1), "dense")
    with pytest.raises(SchemeError, match=r"init_process_group\(\) first"):
        follow(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_wrong_compositions_name_their_cure() -> None:
    for text, cure in {
        "scheme:exchange=gossip,trigger=warm-up(steps=3)": "TargetRate",
        "scheme:trigger=period(steps=3)": "EveryStep",
        "scheme:exchange=gossip,select=randk(rho=0.1)": r"use AllReduce\(\)",
        "scheme:exchange=gossip,select=overlap(rho=0.1)": r"use Server\(\)",
        "scheme:exchange=gossip,memory=residual": "leave memory out",
        "scheme:exchange=gossip,quantize=sign": "use BF16",
        "gossip:rho=0.2,trigger=target-rate(rate=0.1)": "per='model'",
        "gossip:quantize=maxnorm(levels=7)": "use BF16",
        "gossip:rho=0.2,quantize=modulo": "use BF16",
        "gossip:quantize=modulo(bits=9)": "3 to 8",
        "scheme:quantize=modulo": "use Gossip",
        "scheme:exchange=gossip(wait_budget=-1)": "0 to wait for nobody",
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


def test_the_state_of_both_halves_is_saved(halved: None) -> None:
    boxes = local_mailboxes(2)
    scheme = "scheme:quantize=modulo,exchange=gossip(mode=paired,wait_budget=0)"
    learners = [learner_at(box, scheme, 0.1) for box in boxes]
    for number in range(6):
        for learner in learners:
            learner.step(number)
    saved = learners[0].follower.state_dict()
    later = learner_at(local_mailboxes(2)[0], scheme, 0.1).follower
    later.load_state_dict(saved)
    kept = saved["modulo"]
    loaded = later.state_dict()["modulo"]
    assert len(kept["reach"]) == 2 and any(bool(reach.any()) for reach in kept["reach"])
    assert all(torch.equal(new, old) for new, old in zip(loaded["reach"], kept["reach"], strict=True))
    assert torch.equal(loaded["last"], kept["last"])


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
