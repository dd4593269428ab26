"""Rows of a record of the simulation: who is compared with whom, and what a diverged cell counts as."""

import math

from outer_momentum import NETWORKS, rows_of


def _line(part: str, network: str, rule: str, loss: float) -> dict[str, object]:
    return {"part": part, "network": network, "rule": rule, "loss": loss} | {
        "inner": "adamw", "schedule": "cosine", "lr_factor": 1.0
    }  # fmt: skip


def test_rules_are_behind_the_best_fixed_one_and_a_diverged_one_infinitely_far() -> None:
    losses = {"0": 2.0, "0.6": 2.5, "0.9": math.nan, "auto": 2.04}
    rows = rows_of(_line("confirm", "a", rule, loss) for rule, loss in losses.items())
    assert {row["outer momentum"]: row["confirm: worst gap %"] for row in rows} == {
        "0": 0.0, "0.6": 25.0, "0.9": math.inf, "auto": 2.0
    }  # fmt: skip
    assert [row["confirm: cells over 1 %"] for row in rows] == [0, 1, 1, 1]


def test_networks_are_behind_the_first_one_under_each_rule() -> None:
    first, _, other = map(str, NETWORKS["fragments"])
    rows = rows_of(_line("fragments", network, "auto", loss) for network, loss in ((first, 2.0), (other, 1.99)))
    assert {row["network"]: row["fragments: mean gap %"] for row in rows} == {first: 0.0, other: -0.5}
