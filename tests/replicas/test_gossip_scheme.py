"""The frozen scheme of models that gossip."""

from __future__ import annotations

import pytest
import torch

from laconic import GossipScheme, Scheme, SchemeError, attach, follow, parse
from laconic.exchange import AllReduce, Gossip
from laconic.select import TopK
from tests.gossiping import Small


def test_gossip_is_followed_not_attached() -> None:
    model = Small()
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
