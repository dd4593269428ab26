"""Rules for members who may lie: what a third of them can do is bounded, and what is clipped is stated."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from laconic import SchemeError, parse
from laconic.errors import FrameError
from laconic.layout import Layout
from laconic.members.codec import codec_for
from laconic.members.combine import Combine, at_most_median
from laconic.members.messages import Anchor, Bequest, Drift, Join, Request, Update
from laconic.members.syncer import Syncer, fingerprint_of, stated_layouts

RULES = [f"{rule}{mix}" for rule in ("clipped", "median", "trimmed") for mix in ("", "+pairs", "+near")]
SCHEME = "local:every=4"  # anchor -= D, and drifts go as they are
NUM_ENTRIES = 33_000  # more than a chunk, and no whole number of those


def _honest(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(what all have in common, rows that differ from it as much as it is large)."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(NUM_ENTRIES, generator=draw)
    return common, common + torch.randn(n, NUM_ENTRIES, generator=draw)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("f", "n"), [(1, 4), (3, 9)])
@pytest.mark.parametrize("lie", [-10.0, -1e12, 0.0])
def test_a_third_cannot_carry_the_result_off(rule: str, f: int, n: int, lie: float) -> None:
    common, rows = _honest(n)
    f = f if "pairs" not in rule else f // 2  # a liar spoils its pair
    rows[n - f :] = lie * common
    drift = Combine.parse(rule)(rows, [1] * n, "0/0").drift
    error = float((drift - common).norm() / common.norm())
    assert error < 1.0, "it still goes where the honest ones go"  # zeros would be as far as that
    assert rule != "clipped" or lie == 0 or error < 1.1 * (n - f) ** -0.5, "who lies grossly does nothing at all"


@pytest.mark.parametrize("rule", RULES)
def test_what_is_clipped_is_stated(rule: str) -> None:
    for seed in range(3):
        _, rows = _honest(7, seed)
        rows[2] *= -10
        tokens = [3, 5, 5, 1, 5, 4, 5]
        weights = torch.tensor(tokens) / sum(tokens)
        combined = Combine.parse(rule)(rows, tokens, f"0/{seed}")
        away = float((weights @ rows - combined.drift).norm())
        assert away <= 1.001 * sum(w * norm for w, norm in zip(weights.tolist(), combined.clipped_norms, strict=True))
        total = sum(w * share for w, share in zip(weights.tolist(), combined.shares, strict=True))
        assert total == pytest.approx(1, abs=0.01), "what one has less, others have more"  # but what was too long
        assert "pairs" in rule or min(combined.shares) == combined.shares[2] < 0.2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_rows_that_agree_are_their_mean(rule: str, n: int) -> None:
    row = torch.randn(100, generator=torch.Generator().manual_seed(n))
    for rows in (row.repeat(n, 1), torch.zeros(n, 100)):
        combined = Combine.parse(rule)(rows, [2] * n, "0/0")
        assert torch.allclose(combined.drift, rows[0], atol=1e-6)  # some float32 roundings of numbers about 1
        assert max(combined.clipped_norms) < 1e-2  # distances are roots of what inner products leave of each other


@pytest.mark.parametrize("rule", ["clipped", "median"])
def test_without_liars_it_is_nearly_the_mean(rule: str) -> None:
    common, rows = _honest(8)
    drift = Combine.parse(rule)(rows, [1] * 8, "0/0").drift
    assert float((drift - rows.mean(0)).norm() / common.norm()) < 0.01


def _apart(rows: Tensor) -> float:
    return float(torch.nn.functional.pdist(rows).median())


def _lies(attack: str, honest: Tensor, f: int) -> Tensor:
    """What liars send who know all honest rows; with "+" also that equal lies count once."""
    mean, draw = honest.mean(0), torch.Generator().manual_seed(1)
    drawn = torch.randn(f, honest.shape[1], generator=draw)
    if attack.endswith("+"):
        own = drawn / drawn.norm(dim=1, keepdim=True) * _apart(honest)
        adapted: Tensor = _lies(attack[:-1], honest, f) + 0.6 * 0.5**0.5 * own
        return adapted
    if attack == "noise":
        return 10 * drawn
    lie = {
        "flip": -10 * mean,
        "back": mean - _apart(honest) * mean / mean.norm(),  # what min-max comes to
        "alie": mean - 1.5 * honest.std(0),
        "zero": torch.zeros_like(mean),
        "duplicate": honest[0],
    }[attack]
    lies: Tensor = lie.repeat(f, 1)
    return lies


@pytest.mark.parametrize("attack", ["flip", "noise", "back", "alie", "zero", "duplicate", "back+", "zero+"])
@pytest.mark.parametrize(("f", "n"), [(1, 4), (2, 8), (3, 9), (4, 9)])
def test_clipped_takes_little_but_the_honest_mean(attack: str, f: int, n: int) -> None:
    _, honest = _honest(n - f)
    rows = torch.cat([honest, _lies(attack, honest, f)])
    combined = Combine.parse("clipped")(rows, [1] * n, "0/0")
    mean = honest.mean(0)
    error = float((combined.drift - mean).norm() / mean.norm())
    if attack in ("alie", "duplicate"):  # it is as others are, and draws as much as its share, once
        assert error < (1.5 / (n - f + 1) if f < n // 2 else 1.0)  # copies and their original are a majority of 9
    else:
        assert error < 0.02 and max(combined.shares[n - f :]) < 1e-6


def test_clipped_breaks_down_where_half_lie() -> None:
    _, honest = _honest(4)
    rows = torch.cat([honest, _lies("back+", honest, 5)])
    drift = Combine.parse("clipped")(rows, [1] * 9, "0/0").drift
    assert float(drift @ honest.mean(0)) < 0.5 * float(honest.mean(0).square().sum())


def test_few_steps_are_no_lie() -> None:
    _, rows = _honest(8)
    rows[:2] *= 0.2
    tokens = [2, 2, 10, 10, 10, 10, 10, 10]
    weights = torch.tensor(tokens) / sum(tokens)
    combined = Combine.parse("clipped")(rows, tokens, "0/0")
    assert min(combined.shares) > 0.9
    assert float((combined.drift - weights @ rows).norm() / (weights @ rows).norm()) < 0.1


def test_who_has_labels_of_its_own_is_let_in() -> None:
    common, rows = _honest(8)
    draw = torch.Generator().manual_seed(2)
    kinds = torch.randn(4, NUM_ENTRIES, generator=draw)
    rows = 0.5 * common + kinds[[0, 0, 0, 1, 1, 1, 2, 3]] + 0.5 * (rows - common)  # two that are like no other
    combined = Combine.parse("clipped")(rows, [1] * 8, "0/0")
    assert min(combined.shares[6:]) > 0.5


@pytest.mark.parametrize("rule", ["clipped", "clipped+near", "median", "trimmed"])
def test_a_rule_repeats_bit_for_bit_in_any_order(rule: str) -> None:
    _, honest = _honest(6)
    rows = torch.cat([honest, _lies("back+", honest, 3)])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    combined, again = (Combine.parse(rule)(rows.clone(), [1] * 9, "0/0") for _ in range(2))
    permuted = Combine.parse(rule)(rows[order], [1] * 9, "0/0")
    assert torch.equal(combined.drift, again.drift) and combined.shares == again.shares
    assert torch.allclose(combined.drift, permuted.drift, atol=1e-5)  # sums of nine in another order
    assert permuted.shares == pytest.approx([combined.shares[i] for i in order.tolist()], abs=1e-5)


def test_tokens_weigh_no_more_than_the_median_s() -> None:
    assert at_most_median([5, 7, 10**12]) == [5, 7, 7]
    assert at_most_median([4]) == [4]


def test_a_rule_that_does_not_exist_is_one_line() -> None:
    for text in ("krum", "mean+near", "clipped+far"):
        with pytest.raises(SchemeError, match="does not exist; use mean, clipped, median, trimmed"):
            Syncer(parse(SCHEME), combine=text)  # type: ignore[arg-type]


class _Server:
    """A server with members that have its anchor."""

    def __init__(self, combine: str, scheme: str = SCHEME, num_members: int = 4, num_entries: int = 64) -> None:
        layouts = {0: Layout.of(["w"], [num_entries])}
        self.syncer = Syncer(parse(scheme), is_lockstep=True, combine=combine)  # type: ignore[arg-type]
        for i in range(num_members):
            join = Join(f"m{i}", i, fingerprint_of(layouts), 0.9, stated_layouts(layouts))
            self.syncer.on_word(i, join, 0.0, "")
        self.syncer.on_anchor("m0", Anchor.of(0, 0, torch.zeros(num_entries)))
        for i in range(num_members):
            self.syncer.on_request(f"m{i}", Request(0, 0, -1))
        self.codec = codec_for(self.syncer.scheme.exchanged, layouts[0])

    def send(self, i: int, drift: Tensor, tokens: int = 10) -> dict[int, Update]:
        payload, _ = self.codec.encode(drift, (i,))
        version = self.syncer.fragments[0].version
        outgoing = self.syncer.on_drift(f"m{i}", Drift(0, version, i, tokens, 4, 0.0, {}, payload), 0.0)
        return {connection: word for connection, word in outgoing if isinstance(word, Update)}

    @property
    def anchor(self) -> Tensor:
        return self.syncer.fragments[0].anchor


@pytest.mark.parametrize(
    "scheme", [SCHEME, "streaming:every=4,fragments=1,delay=0,lr=1,momentum=0", "sparseloco:every=4"]
)
def test_a_liar_moves_no_anchor_and_is_shown(scheme: str) -> None:
    anchors = {}
    for combine in ("mean", "clipped"):
        server = _Server(combine, scheme)
        for i in range(3):
            server.send(i, torch.ones(64) + 0.01 * i)
        server.send(3, torch.full((64,), -1e6), tokens=10**9)
        anchors[combine] = server.anchor
        shares = {member.id: member.share for member in server.syncer.members.values()}
        norms = {member.id: member.clipped_norm for member in server.syncer.members.values()}
    assert anchors["mean"].abs().max() > 1e5
    assert -1.3 < float(anchors["clipped"].min()) <= float(anchors["clipped"].max()) <= 0
    assert shares["m3"] == 0 < min(shares[f"m{i}"] for i in range(3)) and norms["m3"] > 1e6
    assert server.syncer.tokens == 40, "nor does its word move the clock"


@pytest.mark.parametrize("combine", ["mean", "clipped"])
def test_a_drift_that_is_not_finite_is_left_out_by_name(combine: str, caplog: pytest.LogCaptureFixture) -> None:
    server = _Server(combine)
    with caplog.at_level(logging.WARNING, "laconic.members"):
        for i, value in enumerate((1.0, 1.0, float("nan"), 3e38)):
            updates = server.send(i, torch.full((64,), value))
    assert torch.equal(server.anchor, -torch.ones(64))
    assert [updates[i].is_counted for i in range(4)] == [True, True, False, False], "it stays with its member"
    assert "'m2/2' is left out" in caplog.text and "'m3/3' is left out" in caplog.text


@pytest.mark.parametrize("combine", ["mean", "clipped"])
def test_a_round_of_nothing_readable_moves_no_anchor(combine: str) -> None:
    server = _Server(combine)
    for i in range(4):
        server.send(i, torch.full((64,), float("nan")))
    assert torch.equal(server.anchor, torch.zeros(64)) and server.syncer.fragments[0].version == 1


def test_what_a_liar_leaves_behind_is_a_drift_as_others() -> None:
    server = _Server("clipped")
    server.syncer.on_bequest("m3", Bequest(0, 10**6, torch.full((64,), -1e9).view(torch.uint8)))
    server.syncer.on_lost(3, 0.0)
    for i in range(3):
        server.send(i, torch.ones(64))
    assert torch.allclose(server.anchor, -torch.ones(64))


def test_a_member_that_states_absurd_numbers_ends_nobody_else() -> None:
    """Tokens whose sum no count holds, a loss that no float holds, and a layout of infinite sides."""
    server = _Server("mean")
    with pytest.raises(FrameError, match="sent a drift of"):
        server.send(3, torch.ones(64), tokens=1 << 62)
    with pytest.raises(FrameError, match="is no drift"):
        server.syncer.on_bequest("m3", Bequest(0, 1 << 62, torch.ones(64).view(torch.uint8)))
    payload, _ = server.codec.encode(torch.ones(64), (3,))
    report = {"loss": 10**400, "other": float("nan"), "rate": 0.5}
    server.syncer.on_drift("m3", Drift(0, 0, 3, 10, 4, 0.0, report, payload), 0.0)
    assert server.syncer.members["m3"].report == {"rate": 0.5}
    layouts = {"0": [["w", [float("inf")]]]}
    with pytest.raises(FrameError, match="layout that cannot be read"):
        server.syncer.on_word(9, Join("m9", 9, "", 0.9, layouts), 0.0, "")
