"""Predictions from parts, over cases that can be worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from laconic import SchemeError
from laconic.layout import Layout
from laconic.optim import Muon
from laconic.planning import (
    AUTOMATIC,
    CANDIDATES,
    Compute,
    LinkCost,
    LinkCosts,
    Measured,
    Messages,
    Rehearsal,
    answer,
    candidate,
    kind_of,
    optimizer_name,
    part_of,
    penalty_of,
    predict,
)
from laconic.planning import candidates as room
from laconic.planning.links import PairLink
from laconic.planning.plan import ALONE_S, step_counts
from laconic.planning.rehearsal import equal_messages

COMPUTE = Compute(
    alone_s=0.1, together_s=0.11, arrivals_s=(0.05, 0.09), num_entries=(300, 100), pipelined=False, beside=0.0
)
LINK = LinkCost(latency_s=0.001, busy_latency_s=0.001, bytes_per_s=1e6)
LINKS = LinkCosts(LINK, LINK)
REHEARSAL = Rehearsal(
    choose_s=0.004,
    talk_s=0.02,
    apply_s=0.004,
    bytes_out=18_000,
    messages=Messages(2, 2),
    fixed_s=0.002,
    busy_talk_s=0.0,
    num_buckets=2,
    num_entries=400,
    adds=True,
)


def _measured(**changed: object) -> Measured:
    rehearsals = tuple((candidate(text), REHEARSAL) for text in CANDIDATES)
    layouts = (Layout.of(["a", "b"], [300, 100]),)
    measured = Measured(COMPUTE, LINKS, rehearsals, (), layouts, 4, "convolutional", "sgd", "cpu")
    return replace(measured, **changed)  # type: ignore[arg-type]


def test_what_the_backward_pass_hides_costs_nothing() -> None:
    # Three quarters leave at 50 ms and are there at 71; the rest takes 2 ms of work, 1 of latency and 4.5 of bytes from
    # 90 on, and then the optimizer 20.
    found = predict(candidate("bf16"), COMPUTE, REHEARSAL)
    assert found.step_s == pytest.approx(0.09 + 0.0075 + 0.02)
    assert found.talk_s == pytest.approx(0.0055)


def test_in_a_pipeline_the_longest_station_counts() -> None:
    whole = replace(COMPUTE, arrivals_s=(0.09, 0.09), num_entries=(200, 200), pipelined=True)
    found = predict(candidate("bf16"), whole, replace(REHEARSAL, choose_s=0.01, apply_s=0.01, fixed_s=0.0))
    # The first is chosen in 5 ms and travels for 10, the second for 10 more, and is applied in 5.
    assert found.step_s == pytest.approx(0.09 + 0.005 + 0.02 + 0.005 + 0.02)


def test_work_beside_a_step_is_paid_where_no_core_is_free() -> None:
    busy = replace(COMPUTE, beside=1.0)
    longer = predict(candidate("bf16"), busy, REHEARSAL).step_s - predict(candidate("bf16"), COMPUTE, REHEARSAL).step_s
    assert longer == pytest.approx(0.75 * 0.008)


def test_a_slow_link_sets_the_pace() -> None:
    slow = replace(REHEARSAL, talk_s=2.0, choose_s=0.0, apply_s=0.0)
    assert predict(candidate("bf16"), COMPUTE, slow).step_s == pytest.approx(0.05 + 2.0 + 0.02)
    # streaming sends 8 fragments in 16 steps, each of which may travel for 2 steps unnoticed: 0.2 s.
    fragment_s = 0.001 + (2.0 - 0.002) / 8
    assert predict(candidate("streaming"), COMPUTE, slow).step_s == pytest.approx(0.1 + 8 * (fragment_s - 0.2) / 16)


def test_who_keeps_an_appointment_waits_for_what_crosses() -> None:
    slow = replace(REHEARSAL, talk_s=0.3, choose_s=0.01, apply_s=0.0)
    assert predict(candidate("gossip"), COMPUTE, slow).step_s == pytest.approx(0.1 + 0.01 + 0.3)
    assert predict(candidate("gossip:mode=free"), COMPUTE, slow).step_s == pytest.approx(0.3)


def test_short_messages_have_no_ramp() -> None:
    """Of norms and codes the codes alone take as long as TCP takes to speed up."""
    link = LinkCost(latency_s=0.02, busy_latency_s=0.02, bytes_per_s=1e6, ramp=((100_000, 0.1),))
    messages = equal_messages({"norms": 4, "codes": 200_000}, Counter(norms=1, codes=1))
    assert messages.count == 2 and messages.long == pytest.approx(1, abs=1e-3)
    assert link.seconds(200_000, messages) == pytest.approx(2 * 0.02 + 0.1 + 0.2, abs=1e-3)
    assert link.seconds(200_000, Messages(2, 2)) == pytest.approx(2 * 0.02 + 2 * 0.1 + 0.2)


def test_accumulating_divides_what_is_exchanged() -> None:
    once = predict(candidate("bf16"), COMPUTE, REHEARSAL)
    fourth = predict(candidate("bf16 --accumulate 4"), COMPUTE, REHEARSAL)
    assert fourth.step_s == pytest.approx((3 * 0.1 + once.step_s) / 4)
    assert fourth.bytes_out == pytest.approx(once.bytes_out / 4)


def test_an_exchange_on_other_links_keeps_what_was_not_theirs() -> None:
    faster = REHEARSAL.on(LINKS, LINKS.at(80e6))  # ten times the 8 Mbit/s
    assert LINKS.bits_per_s == pytest.approx(8e6)
    assert faster.talk_s == pytest.approx(2 * 0.001 + 0.0018)  # nothing was waited for beyond bytes and latency
    assert replace(REHEARSAL, talk_s=0.025).on(LINKS, LINKS).talk_s == pytest.approx(0.025)


def test_of_nearly_equal_ones_the_simpler_is_picked() -> None:
    free = replace(REHEARSAL, talk_s=0.0, choose_s=0.0, apply_s=0.0, messages=Messages(0, 0))
    equal = replace(COMPUTE, together_s=0.1)  # nobody is slower than the others
    found = answer(_measured(compute=equal, rehearsals=tuple((candidate(text), free) for text in CANDIDATES)))
    assert found.pick == "dense" and found.limit == "host cores"
    assert found.reasons[0].startswith("do not compress: the network is 0 %")


def test_a_part_is_of_the_larger_parameters_cut_to_their_first_rows() -> None:
    layout = Layout.of(["a", "b", "c"], [(10, 7), (3,), (100, 2, 2)])
    flat = torch.arange(473.0)
    for wanted, shapes in ((50, [(12, 2, 2), (1, 7)]), (470, [(100, 2, 2), (10, 7)]), (0.1, [(1, 2, 2)])):
        ((part, values),) = part_of([(layout, flat)], wanted)
        assert [span.shape for span in part.spans] == shapes
        assert values[0] == 73 and values.numel() == part.num_entries


@pytest.mark.parametrize(("step_s", "numbers"), [(0.1, (5, 10, 3)), (3.0, (2, 1, 1)), (10.0, (0, 0, 0))])
def test_of_long_steps_fewer_are_taken(step_s: float, numbers: tuple[int, int, int]) -> None:
    assert step_counts(step_s, ALONE_S - 2 * step_s) == numbers


def test_a_row_can_be_asked_for_again_and_its_text_makes_it() -> None:
    found = answer(_measured())
    assert {row.scheme for row in found.rows} == {str(candidate(text)) for text in CANDIDATES}
    assert all(str(candidate(row.scheme)) == row.scheme for row in found.rows)
    said = found.as_dict()
    assert said["pick"] in {row["scheme"] for row in said["rows"]} and json.dumps(said)
    assert {"scheme", "step_ms", "bytes_out", "steps_factor", "seconds_to_target"} <= set(said["rows"][0])


def test_what_was_tried_is_compared_elsewhere_as_here() -> None:
    tried = ((candidate("bf16"), 0.5), (candidate("dense"), 0.6))
    here = answer(_measured(tried_s=tried))
    same = here.what_if(bits_per_s=LINKS.bits_per_s)
    assert {row.scheme: row.step_ms for row in same.rows} == pytest.approx(
        {row.scheme: row.step_ms for row in here.rows}
    )
    assert same.pick == here.pick and not any(row.tried for row in same.rows)


def test_no_step_alone_is_longer_than_one_that_was_tried() -> None:
    tried = _measured().with_tried({candidate("bf16"): 0.08, candidate("topk:rho=0.01"): 0.2})
    steps_ms = {row.scheme: row.step_ms for row in answer(tried).rows}
    assert steps_ms["bf16 --accumulate 4"] == pytest.approx(80) and steps_ms["topk:rho=0.01"] == pytest.approx(200)
    assert steps_ms["streaming"] < steps_ms["local:every=16"] < 100


def test_no_rate_is_named_from_which_on_chance_would_decide_otherwise() -> None:
    tried = ((candidate("bf16"), 0.08), (candidate("dense"), 0.1))  # the first of them luckier than without a network
    plan = answer(_measured(tried_s=tried))
    assert plan.pick == "bf16" and plan.what_if(bits_per_s=1e9).pick == "dense"
    assert not any("it would be dense" in reason for reason in plan.reasons)


def test_the_same_scheme_is_not_named_for_slower_and_for_faster_links() -> None:
    free = replace(REHEARSAL, talk_s=0.0, fixed_s=0.0, choose_s=0.0, apply_s=0.0, bytes_out=0, messages=Messages(0, 0))
    lucky = candidate("maxnorm:bits=4")
    rehearsals = ((lucky, REHEARSAL), (candidate("topk:rho=0.01"), free))
    equal = replace(COMPUTE, together_s=0.1)
    plan = answer(_measured(compute=equal, rehearsals=rehearsals, tried_s=((lucky, 0.09),)))
    assert plan.pick == "maxnorm:bits=4"
    assert plan.what_if(bits_per_s=4e6).pick == plan.what_if(bits_per_s=1e9).pick == "topk:rho=0.01"
    assert not any("it would be" in reason for reason in plan.reasons)


def test_curves_go_down_to_what_no_link_can_hasten() -> None:
    found = answer(_measured())
    assert found.curves().keys() == {row.scheme for row in found.rows}
    for points in found.curves().values():
        rates, steps_ms = zip(*points, strict=True)
        assert rates[0] == pytest.approx(1e6) and rates[-1] == pytest.approx(1e11)
        assert list(steps_ms) == sorted(steps_ms, reverse=True) and steps_ms[-1] >= 100
    slow = {row.scheme: row.step_ms for row in found.what_if(bits_per_s=1e6).rows}
    assert {scheme: points[0][1] for scheme, points in found.curves().items()} == pytest.approx(slow)


def test_a_pair_much_slower_than_others_is_named() -> None:
    alike = [PairLink(0, 1, 0.001, 1e6), PairLink(1, 0, 0.001, 0.9e6), PairLink(0, 2, 0.001, 1.1e6)]
    too_short = PairLink(2, 1, 0.3, 1e3, settled=False)
    even = answer(_measured(pairs=(*alike, too_short)))
    assert even.as_dict()["slowest_pair"]["source"] == 1 and not any("sends to" in said for said in even.reasons)
    uneven = answer(_measured(pairs=(*alike, PairLink(2, 0, 0.02, 1e5))))
    assert any("rank 2 sends to rank 0 at 800kbit, others at 7.6mbit (20 ms" in said for said in uneven.reasons)
    assert uneven.what_if(workers=8).measured.slowest_pair is None, "which are not these"


def test_more_workers_send_what_their_schemes_say() -> None:
    more = answer(_measured()).what_if(workers=16)
    by_name = {row.scheme: row.bytes_out for row in more.rows}
    assert by_name["bf16"] == pytest.approx(18_000 * (15 / 16) / (3 / 4), rel=0.01)  # a ring's share


@pytest.mark.parametrize(
    "text", ["bf16 --accumulate 0", "bf16 --accumulate", "bf16 4", "local --accumulate 2", "torch-powersgd", "nothing"]
)
def test_what_is_no_candidate_is_refused(text: str) -> None:
    with pytest.raises(SchemeError):
        candidate(text)


def test_kinds_are_told_apart() -> None:
    assert kind_of(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))) == "transformer"
    assert kind_of(nn.Sequential(nn.Conv2d(1, 1, 3))) == "convolutional"
    weights = [nn.Parameter(nn.Linear(2, 2).weight)]
    assert optimizer_name(optim.AdamW(weights)) == "adamw" and optimizer_name(optim.SGD(weights)) == "sgd"
    assert optimizer_name(Muon(nn.Linear(2, 2))) == "muon"
    factored = optim.Adafactor(weights)
    weights[0].grad = torch.ones_like(weights[0])
    factored.step()  # type: ignore[no-untyped-call]
    assert optimizer_name(factored) == "adamw"
    assert optimizer_name([torch.optim.Muon(weights), optim.AdamW(weights)]) == "muon"


def test_penalties_are_those_of_the_record() -> None:
    record = Path(__file__).parents[2] / "results" / "steps-to-target.json"
    assert record.read_bytes() == Path(room.__file__).with_name("steps_to_target.json").read_bytes()
    for row in json.loads(record.read_text())["rows"]:
        if row["scheme"] == "topk:rho=0.01" and row["kind"] == "convolutional" and row["optimizer"] == "sgd":
            found = penalty_of(candidate("topk:rho=0.01"), "convolutional", "sgd")
            assert found is not None and found.factor == max(1.0, row["factor"]) and "topk:rho=0.01" in found.source
            break
    else:
        pytest.fail("the record has no row of topk:rho=0.01")


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("topk:rho=0.02", "topk:rho=0.01"),
        ("streaming:every=12", "streaming:fragments=4,delay=4"),
        ("streaming:every=24,bits=2", "streaming:fragments=4,delay=4,bits=2"),
        ("streaming:every=100", "streaming:every=64,fragments=4,delay=4"),
        ("muloco:every=16,fragments=4,delay=4", "muloco"),
        ("muloco:every=16,bits=2", "muloco:bits=2"),
        ("bf16 --accumulate 3", "bf16 --accumulate 4"),
        ("gossip:mode=matched", "gossip"),
    ],
)
def test_penalties_of_what_is_not_on_record_are_those_of_the_nearest(wanted: str, near: str) -> None:
    found = penalty_of(candidate(wanted), "transformer", "muon")
    assert found is not None and found.source == f"{near} on gpt-tiny under muon"


def test_auto_chooses_among_what_takes_a_script_as_it_is_and_bf16_for_what_nobody_compresses() -> None:
    assert "bf16" in AUTOMATIC and "dense" not in AUTOMATIC
    assert {candidate(text).accumulate for text in AUTOMATIC} == {1}
