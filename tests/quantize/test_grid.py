"""Integers that add up: the draws, the words, the sums, the grids and what they lose."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic import Scheme, SchemeError, Session, kernels, parse
from laconic.kernels import Key, key_of
from laconic.kernels.reference.rounding import draw_bits
from laconic.layout import Layout
from laconic.paths import bits_per_entry
from laconic.quantize import GRIDS, Carrier, Grid, MaxNorm, carrier_for, largest_levels, round_up
from laconic.select import RandK
from laconic.transport import InProcess, agree, agreement_bytes, in_process, ring_bytes
from tests.virtual import one_step, run

CPU = torch.device("cpu")
KEY = key_of(1, 2, 3)


def _slow_draw(position: int, key: Key) -> int:
    x = (position ^ key[0]) & 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= key[1] & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    x ^= x >> 16
    return x >> 8


def test_draws_are_those_of_plain_integers() -> None:
    for key in (KEY, key_of(0), (-1, 2**31 - 1), (-(2**31), 0)):
        assert draw_bits(1000, key, CPU).tolist() == [_slow_draw(i, key) for i in range(1000)]


def test_draws_are_uniform_and_of_their_own_for_each_key() -> None:
    n = 200_000
    draws = [draw_bits(n, key_of(0, rank, step), CPU).double() / 2**24 for rank in range(3) for step in range(3)]
    for i, one in enumerate(draws):
        # Standard deviations: of a mean 0.29/sqrt(n), of a correlation 1/sqrt(n); five of them.
        assert abs(float(one.mean()) - 0.5) < 5 * 0.29 / n**0.5
        assert abs(float(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1])) < 5 / n**0.5
        assert all(abs(float(torch.corrcoef(torch.stack([one, o]))[0, 1])) < 5 / n**0.5 for o in draws[:i])
        assert int(torch.histc(one, 100, 0, 1).min()) > n / 100 * 0.85


def _carriers() -> list[Carrier]:
    return [carrier_for(s, m, stages) for s in (1, 2, 7, 15, 127, 500) for m in (1, 2, 3, 4, 8) for stages in (1, 2)]


def test_a_carrier_wastes_as_little_as_it_says() -> None:
    bits = {(s, m): carrier_for(s, m, 1).bits_per_entry for s in (1, 7, 15, 127) for m in (2, 4, 16)}
    assert (bits[7, 4], round(bits[15, 4], 2), bits[1, 4]) == (6.4, 7.11, 4.0)
    assert all(carrier_for(s, 1000, 2).bits_per_entry == b for s, b in {1: 2, 7: 4, 127: 8}.items())
    assert carrier_for(7, 4).num_rows == 1 and carrier_for(7, 64).num_rows == 64  # the size decides
    for carrier in _carriers():
        assert carrier.bits_per_entry >= carrier.lane_bits and carrier.num_words(0) == 0
        assert carrier.num_words(1001) * carrier.lanes >= 1001 and carrier.num_words(1001) % carrier.num_rows == 0


@pytest.mark.parametrize("num_workers", [2, 5, 64, 1000])
def test_too_many_levels_are_refused_by_the_number_that_fits(num_workers: int) -> None:
    most = largest_levels(num_workers)
    assert carrier_for(most, num_workers, 1).lane_bits == 16
    with pytest.raises(SchemeError, match=f"use {most} levels or fewer, or stages=2"):
        carrier_for(most + 1, num_workers, 1)
    scheme = Scheme(quantize=MaxNorm(levels=40_000 // num_workers), exchange=parse("maxnorm:stages=1").exchange)
    if num_workers <= 5:
        with pytest.raises(SchemeError, match="levels or fewer"):
            run(scheme, num_workers, lambda session, rank: None)


@pytest.mark.parametrize("levels", [1, 7, 127, 0])
def test_sums_are_exact_at_the_limit(levels: int) -> None:
    """Every worker at +s, at -s, or at random in between: the words' plain sum holds the sum of the codes."""
    count, one = 331, torch.ones(1)
    for num_workers in range(2, 65):
        s = levels or largest_levels(num_workers)
        carrier = carrier_for(s, num_workers, 1)
        generator = torch.Generator().manual_seed(num_workers)
        codes = torch.randint(-s, s + 1, (num_workers, count), generator=generator)
        codes[:, ::3], codes[:, 1::3] = s, -s
        total = torch.zeros(carrier.num_words(count), dtype=carrier.dtype)
        for row in codes:
            total += kernels.quantize_pack(
                row.float(), one, count, s, carrier.lane_bits, total.numel(), carrier.dtype, KEY
            )
        read = kernels.unpack_scale(total, count, carrier.lane_bits, one, count)
        assert torch.equal(read, codes.sum(0).float()), num_workers


@given(levels=st.integers(1, 1000), count=st.integers(0, 300), group=st.integers(1, 50), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_packing_loses_nothing_but_the_rounding(levels: int, count: int, group: int, seed: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    norms = kernels.largest_magnitudes(x, group)
    assert norms.tolist() == [float(part.abs().max()) for part in x.split(group)] if count else norms.numel() == 0  # type: ignore[no-untyped-call]
    carrier = carrier_for(levels, 1)
    words = kernels.quantize_pack(
        x, levels / norms, group, levels, carrier.lane_bits, carrier.num_words(count), carrier.dtype, KEY
    )
    read = kernels.unpack_scale(words, count, carrier.lane_bits, norms / levels, group)
    step = (norms / levels).repeat_interleave(group)[:count]
    assert bool(((read - x).abs() <= step * (1 + 1e-5 * levels)).all())


def test_rounding_is_as_defined() -> None:
    x, levels = torch.randn(999, generator=torch.Generator().manual_seed(3)), 7
    norm = kernels.largest_magnitudes(x, 999)
    carrier = carrier_for(levels, 4, 1)
    words = kernels.quantize_pack(
        x, levels / norm, 999, levels, carrier.lane_bits, carrier.num_words(999), carrier.dtype, KEY
    )
    inverse = levels / norm
    for position, (value, code) in enumerate(
        zip(x, kernels.unpack_scale(words, 999, carrier.lane_bits, torch.ones(1), 999).tolist(), strict=True)
    ):
        place = float((value.abs() * inverse)[0])
        up = _slow_draw(position, KEY) / 2**24 < place - math.floor(place)
        assert code == math.copysign(min(math.floor(place) + up, levels), value)


def test_a_nan_is_the_largest_of_all() -> None:
    x = torch.tensor([1.0, -2.0, torch.nan, 3.0, -torch.inf, 0.0, -0.0])
    assert kernels.largest_magnitudes(x, 2).tolist() == [2.0, torch.inf, torch.inf, 0.0]


def test_two_stages_average_without_bias() -> None:
    draws, carrier, one = 10_000, carrier_for(7, 3, 2), torch.ones(1)
    codes = torch.tensor([[7, -7, 1, 0, -1, 3], [7, -7, 0, 0, 0, -4], [7, -7, 0, 0, -1, 2]])
    count = 6 * draws
    packed = [
        kernels.quantize_pack(
            row.float().repeat(draws),
            one, count, 7, carrier.lane_bits, carrier.num_words(count), carrier.dtype, KEY,
        )
        for row in codes
    ]  # fmt: skip
    words = kernels.average_words(torch.stack(packed), carrier.lane_bits, KEY)
    drawn = kernels.unpack_scale(words, count, carrier.lane_bits, one, count).view(draws, 6)
    assert float(drawn.abs().max()) == 7
    # A Bernoulli's deviation is at most 1/2; five of the mean's.
    torch.testing.assert_close(drawn.mean(0), codes.float().mean(0), atol=2.5 / draws**0.5, rtol=0)


@pytest.mark.parametrize(
    ("text", "extra"),
    [
        ("maxnorm:bits=2,block=0", 0),
        ("maxnorm:bits=4,block=8", 0),
        ("multiscale:bits=3,share=4", 0),
        ("multiscale:bits=3+6,share=1", 0),
        ("maxnorm:bits=3,block=0,stages=2", 1),
    ],
)
@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_mean_of_10_000_draws_is_the_true_mean(text: str, extra: int, num_workers: int) -> None:
    """And the variance is under n^2*N/(4*s^2*M), n rounded up to a bf16. Copies of an entry are draws of it.

    A second rounding of the mean has a variance of its own, up to n^2*N/(4*s^2): the bound of one stage does not hold.
    """
    draws, scheme = 10_000, parse(text)
    assert isinstance(scheme, Scheme) and isinstance(scheme.quantize, Grid)
    x = torch.randn(num_workers, 24, generator=torch.Generator().manual_seed(5)) ** 3
    layout = (Layout.of(["a"], [draws * 24]),)
    out = run(scheme, num_workers, lambda session, rank: one_step(session, {"a": x[rank].repeat(draws)}, layout)["a"])
    drawn, true = out[0].view(draws, 24).double(), x.double().mean(0)
    step = float(round_up(x.abs().max().view(1))) / scheme.quantize.levels
    # Of one entry's mean over workers and draws: deviation at most step/2/sqrt(M*draws); five of them.
    atol = 2.5 * step * ((1 / num_workers + extra) / draws) ** 0.5
    torch.testing.assert_close(drawn.mean(0), true, atol=atol, rtol=1e-5)
    variance, bound = float((drawn - true).square().sum(1).mean()), step**2 * 24 / 4
    assert variance <= bound * (1 / num_workers + extra)
    assert variance > bound / num_workers or not (extra and num_workers > 1)


@pytest.mark.parametrize("mode", ["cycle", "independent"])
def test_random_k_without_memory_is_unbiased(mode: str) -> None:
    steps, layout = 1000, (Layout.of(["a"], [1001]),)
    scheme = parse(f"randk-maxnorm:rho=0.25,mode={mode},memory=none,bits=6")
    assert isinstance(scheme, Scheme)
    x = torch.randn(1001, generator=torch.Generator().manual_seed(6))

    def work(session: Session, rank: int) -> Tensor:
        return torch.stack([one_step(session, {"a": x.clone()}, layout)["a"] for _ in range(steps)]).mean(0)

    # An entry goes in a quarter of the steps with four times its value: deviation sqrt(3)*|x|, and the rounding's.
    allowed = 6 * (3**0.5 * x.abs() + 4 * 4 / 31) / steps**0.5
    assert bool(((run(scheme, 1, work)[0] - x).abs() <= allowed).all())


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("stages", [1, 2])
def test_zero_constant_and_outlier(name: str, stages: int) -> None:
    scheme = parse(f"{name}:bits=4,stages={stages}")
    assert isinstance(scheme, Scheme)
    layout = (Layout.of(["a"], [1000]),)
    outlier = torch.full((1000,), 1e-3)
    outlier[500] = -(2.0**60)
    vectors = {"zero": torch.zeros(1000), "constant": torch.full((1000,), -2.5), "tiny": torch.full((1000,), 1e-42)}

    def work(session: Session, rank: int) -> None:
        for what, x in vectors.items():
            out = one_step(session, {"a": x.clone()}, layout)["a"]
            if what == "tiny":
                assert float(out.abs().max()) < 1e-30
            else:
                torch.testing.assert_close(out, x, rtol=1e-6, atol=0)
        out = one_step(session, {"a": outlier if rank == 0 else torch.zeros(1000)}, layout)["a"]
        assert bool(out.isfinite().all())
        if stages == 1:
            assert float(out[500]) == pytest.approx(-(2.0**60) / 3, rel=1e-5)

    run(scheme, 3, work)


def test_multiscale_takes_the_finest_scale_that_fits_all() -> None:
    """Worker 1's large entries coarsen what worker 0 alone would write finely."""
    scheme = parse("multiscale:levels=7,scales=2,ratio=8,share=1")
    assert isinstance(scheme, Scheme)
    layout = (Layout.of(["a"], [4]),)
    rows = [torch.tensor([7.0, 0.0625, 0.0625, 0.875]), torch.tensor([0.0, 0.0625, 4.0, 0.125])]

    def work(session: Session, rank: int) -> list[Tensor]:
        return [2 * one_step(session, {"a": rows[rank].clone()}, layout)["a"] for _ in range(50)]

    for out in run(scheme, 2, work)[0]:
        steps = torch.tensor([1.0, 0.125, 1.0, 0.125])  # of the sum
        assert torch.equal(out / steps, (out / steps).round())
        assert float(out[0]) == 7 and float(out[3]) == 1.0  # 7/8 and 1/8 lie on the fine grid


def test_a_number_of_entries_takes_the_place_of_a_share() -> None:
    layout = Layout.of(["a", "s"], [1500, 10])
    select = RandK(k=40)
    assert [select.plan(layout, density).k for density in (select.density, 1.0)] == [40, 1500]
    assert RandK(k=9999).plan(layout, 0.5).k == 1500
    for wrong in ({}, {"rho": 0.1, "k": 3}, {"k": -1}):
        with pytest.raises(SchemeError, match="RandK"):
            RandK(**wrong)


def test_random_k_visits_every_entry_once_in_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(["a", "s", "b", "t", "u", "c"], [1500, 10, 1301, 7, 3, 2000])
    for rho in (0.5, 0.1, 0.013):
        select, apart = RandK(rho=rho, seed=3, mode="cycle"), RandK(rho=rho, seed=3)
        plan = select.plan(layout, rho)
        large = set(range(layout.num_entries)) - {p for s in plan.fixed for p in range(s.start, s.stop)}
        turns = -(-len(large) // plan.k)
        orders = []
        for cycle in range(3):
            steps = [select.positions(plan, cycle * turns + turn, 0, CPU).tolist() for turn in range(turns)]
            assert set().union(*steps) == large
            assert sum(map(len, steps[:-1])) == len(set().union(*steps[:-1]))  # only the last turn fills up
            assert all(len(set(step)) == plan.k for step in steps)
            orders.append(steps)
        assert orders[0] != orders[1] != orders[2]
        drawn = [apart.positions(plan, step, 0, CPU).tolist() for step in range(20)]
        assert all(set(p) <= large and len(set(p)) == plan.k for p in drawn)
        assert len({tuple(p) for p in drawn}) == 20
        assert all(p == sorted(p) for p in drawn)
        with monkeypatch.context() as patch:
            patch.setenv("LACONIC_KERNELS", "reference")
            assert drawn == [apart.positions(plan, step, 0, CPU).tolist() for step in range(20)]
            assert orders[0] == [select.positions(plan, step, 0, CPU).tolist() for step in range(turns)]


@pytest.mark.parametrize(("n", "k"), [(576, 58), (1001, 10), (1000, 250)])  # 576: 3x3 kernels of 64 channels
def test_random_k_draws_each_set_alike(n: int, k: int) -> None:
    """As many sets as draws; entries and pairs at each distance are as frequent as among sets drawn at random.

    A chi-square of d degrees has mean d and deviation sqrt(2d): five of those are allowed, one in a million. What a
    distance gathers over all draws is a sum of thousands of pairs: its deviation is at most that of independent ones.
    """
    select, draws = RandK(rho=k / n, dense_below=0), 3000
    plan = select.plan(Layout.of(["a"], [n]), select.rho)
    rows = np.stack([select.positions(plan, step, 0, CPU).numpy() for step in range(draws)])
    assert len({row.tobytes() for row in rows}) == draws
    counts, expected = np.bincount(rows.ravel(), minlength=n), draws * k / n
    chi_square = float(((counts - expected) ** 2 / (expected * (1 - k / n))).sum()) * (n - 1) / n
    assert abs(chi_square - (n - 1)) < 5 * (2 * (n - 1)) ** 0.5
    is_drawn = np.zeros((draws, n))
    np.put_along_axis(is_drawn, rows, 1.0, 1)
    spectrum = np.abs(np.fft.rfft(is_drawn)) ** 2
    pairs = np.fft.irfft(spectrum.sum(0), n)[1 : (n + 1) // 2]  # around a ring, by how far apart they are
    expected = draws * k * (k - 1) / (n - 1)
    assert abs(float(pairs[0]) - expected) < 5 * expected**0.5
    assert float(np.abs(pairs - expected).max()) < 6 * expected**0.5  # the largest of hundreds


@pytest.mark.parametrize(
    ("text", "bits"), [("maxnorm:bits=4", 6.5), ("maxnorm:levels=15", 7.2), ("maxnorm:bits=2", 4.1)]
)
def test_bits_per_entry_among_four(text: str, bits: float) -> None:
    scheme, layout = parse(text), (Layout.of(["a"], [100_000]),)
    assert isinstance(scheme, Scheme)

    def work(session: Session, rank: int) -> float:
        one_step(session, {"a": torch.randn(100_000)}, layout)
        return session.stats().bytes_out * 8 / ring_bytes(100_000, 4)

    assert max(run(scheme, 4, work)) <= bits
    assert max(run(scheme, 4, work)) == pytest.approx(bits_per_entry(scheme, layout[0], 4))


def test_kept_rounding_does_not_grow() -> None:
    """With error feedback a residual stays within what rounding can lose; one level is refused since it would not."""
    scheme = parse("scheme:quantize=maxnorm(levels=2),memory=residual")
    assert isinstance(scheme, Scheme)
    layout = (Layout.of(["a"], [5000]),)

    def work(session: Session, rank: int) -> float:
        for step in range(100):
            x = torch.randn(5000, generator=torch.Generator().manual_seed(step)).clamp(-3, 3)
            one_step(session, {"a": x}, layout)
        return float(session.state_dict()["memory"]["residual"]["a"].abs().max())

    assert max(run(scheme, 2, work)) <= 3  # e <= n/s and n <= 3 + e: at most 3/(s - 1)


def test_norms_are_rounded_up_to_16_bits() -> None:
    x = torch.cat([torch.rand(1000), torch.tensor([0.0, 1.0, 1e-45, 3.38e38, torch.inf])])
    up = round_up(x).float()
    assert bool((up >= x).all()) and bool((up[:-1] <= x[:-1] * (1 + 2.0**-7) + 1e-40).all())
    assert torch.equal(round_up(up).float(), up) and float(up[1000]) == 0


@pytest.mark.parametrize("count", [1, 1000, 12_288, 12_289, 20_001])
def test_workers_agree_at_the_foretold_price(count: int) -> None:
    rows = torch.randn(3, count, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)

    def work(transport: InProcess) -> tuple[Tensor, int]:
        agreed = agree(transport, rows[transport.rank], lambda everyone: everyone.amax(0), "norms")
        return agreed, transport.traffic.bytes_out

    for agreed, bytes_out in in_process(3, work):
        assert torch.equal(agreed, rows.amax(0)) and bytes_out == agreement_bytes(count, 2, 3)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(
    "text", ["maxnorm", "multiscale:stages=2", "randk-maxnorm:rho=0.01,memory=none", "randk-maxnorm"]
)
def test_an_overflow_anywhere_is_seen_by_all_and_by_the_next_step_by_none(text: str, bad: float) -> None:
    scheme, layout = parse(text), (Layout.of(["a"], [3000]),)
    assert isinstance(scheme, Scheme)

    def work(session: Session, rank: int) -> tuple[bool, bool, int]:
        x = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
        hurt = x.clone()
        if rank == 1:
            hurt[1234] = bad
        seen = one_step(session, {"a": hurt}, layout)["a"].isnan().all()
        again = one_step(session, {"a": x}, layout)["a"].isfinite().all()
        return bool(seen), bool(again), session.stats().skipped_steps

    assert run(scheme, 3, work) == [(True, True, 1)] * 3
