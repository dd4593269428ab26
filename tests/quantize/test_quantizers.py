"""What rounding may lose, and that nothing finite becomes infinite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.layout import Layout
from laconic.memory import Due
from laconic.paths.frames import FramePlan
from laconic.quantize import (
    QUANTIZERS,
    Difference,
    Levels,
    Lloyd,
    ModuloCode,
    Quantizer,
    Sign,
    Trits,
    exponents_for,
    num_blocks,
    steps_of,
)
from laconic.select import Chooser
from tests.parts import made

RELATIVE = {"none": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}  # half an ulp; bf16 is cut at its largest value: one ulp


def test_every_quantizer_is_tested() -> None:
    assert {*RELATIVE, "sign", "levels", "lloyd"} == set(QUANTIZERS)
    others = Trits.code_id, ModuloCode.code_id, Difference.code_id
    assert len({q.code_id for q in QUANTIZERS.values()} | set(others)) == len(QUANTIZERS) + len(others)


def test_steps_that_can_be_told_are_not_below_those_asked_for() -> None:
    asked = torch.logspace(-9, 9, 999)
    told = steps_of(exponents_for(asked))
    assert bool((told >= 0.99999 * asked).all()) and bool((told <= 1.19 * asked).all())
    assert steps_of(torch.tensor([-128, -5, 0, 4, 127], dtype=torch.int8)).tolist()[2:4] == [1.0, 2.0]
    assert float(steps_of(exponents_for(torch.zeros(1)))) == 2.0**-32


@pytest.mark.parametrize("count", [1, 8, 256, 1000])
def test_remainders_are_read_as_they_were_written_and_unbiased(count: int) -> None:
    quantize, draw = ModuloCode(bits=4), torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=draw)
    y = x + 0.03 * torch.rand(count, generator=draw)
    exponents = exponents_for(torch.full((num_blocks(count),), 0.011))
    total = torch.zeros(count)
    for turn in range(200):
        told = quantize.encode(y, exponents, turn / 200)
        codes, scale = quantize.write(told)
        assert codes.numel() == quantize.num_bytes(count)
        way, compared = quantize.compare(x, quantize.read(codes, scale, count), out=torch.empty(count))
        assert bool((compared.peaks >= 0).all())
        codes, scale = quantize.answer.write(compared)
        assert codes.numel() == quantize.answer.num_bytes(count)
        back = quantize.answer.move(quantize.answer.read(codes, scale, count), exponents, out=torch.empty(count))
        assert torch.equal(back, -way)
        total += way
    torch.testing.assert_close(total / 200, (y - x) / 2, atol=2e-4, rtol=0)


def test_signs_keep_signs_and_the_mean_size() -> None:
    values = torch.randn(77, generator=torch.Generator().manual_seed(1))
    codes, scale = Sign().encode(values)
    assert codes.nbytes == Sign().num_bytes(77) == 12
    assert torch.equal(Sign().decode(codes, scale)[:77], values.sign() * scale)
    torch.testing.assert_close(scale, values.abs().mean())


@pytest.mark.parametrize("bits", [2, 4, 5, 12])
def test_levels_are_the_nearest_of_a_grid_under_the_frame_s_norm(bits: int) -> None:
    values = torch.randn(77, generator=torch.Generator().manual_seed(1)) * 2.0**-60
    quantize = Levels(bits=bits)
    codes, step = quantize.encode(values)
    assert codes.nbytes == quantize.num_bytes(77)
    decoded = quantize.decode(codes, step)[:77]
    assert bool(((decoded - values).abs() <= 0.501 * step).all())
    assert float(decoded.abs().max()) == pytest.approx(float(values.abs().max()))


@pytest.mark.parametrize("group", [16, 128, 4096])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 127, 128, 129, 1000])
def test_every_value_becomes_the_nearer_of_two_sizes_that_keep_the_mean(group: int, count: int) -> None:
    values = _largest(count, scale=2.0**-60)
    quantize = Lloyd(group=group)
    codes, scale = quantize.encode(values)
    assert codes.nbytes == quantize.num_bytes(count)
    decoded = quantize.decode(codes, scale)[:count]
    assert torch.equal(decoded.sign(), values.sign())
    for here, there in zip(torch.split(values.abs(), group), torch.split(decoded.abs(), group), strict=True):
        sizes = torch.tensor(sorted(set(there.tolist())))
        assert sizes.numel() <= 2
        assert torch.equal((here.unsqueeze(1) - sizes).abs().min(1).values, (here - there).abs())
    # A size is rounded by up to 6 %, and the smaller by a thirty-second of the larger.
    torch.testing.assert_close(decoded.abs().mean(), values.abs().mean(), rtol=0.1, atol=0)


def test_two_sizes_lose_less_than_three_levels_or_signs() -> None:
    values = _largest(6400)

    def lost(quantize: Quantizer, count: int = 6400) -> float:
        rows = [quantize.decode(*quantize.encode(row))[:count] for row in torch.split(values, count)]
        return float(((torch.cat(rows) - values) ** 2).sum() / (values**2).sum())

    assert lost(Lloyd()) < 0.5 * lost(Sign(), 128) < 0.1 * lost(Levels(bits=2), 128) < 0.1 * lost(Levels(bits=2))


def test_two_sizes_of_groups_far_below_the_largest_value() -> None:
    values = torch.ones(16 * 4)
    values[16:] *= 2.0**-20
    values[32:] *= 2.0**-11
    values[48:] *= 2.0**-9
    quantize = Lloyd(group=16)
    decoded = quantize.decode(*quantize.encode(values))
    assert torch.equal(decoded[:48], values[:48]) and not decoded[48:].any()


def test_bits_of_an_entry_that_goes_position_and_frame_included() -> None:
    n = 1_000_000
    scheme = made("chunked:rho=0.015625,quantize=lloyd")
    assert isinstance(scheme.select, Chooser)
    plan = FramePlan(scheme.select, Lloyd(), Layout.of(["weight"], [n]), 1 / 64, torch.device("cpu"))
    chosen, values = plan.withdraw_(torch.randn(n, generator=torch.Generator().manual_seed(1)), Due(None, 1.0))
    codes, scale = Lloyd().encode(values)
    foretold = plan.shape.write(chosen, codes, scale, step=0, bucket=0)
    assert 8 * foretold.numel() == 8 * plan.shape.num_bytes < 10.15 * chosen.numel()
    shortest = plan.shape.write_smallest(chosen, codes, scale, step=0, bucket=0)
    assert 8 * shortest.numel() < 9.75 * chosen.numel()


def _largest(count: int, scale: float = 1.0) -> Tensor:
    """The largest of a hundred times as many values with heavy tails: none is small."""
    values = torch.randn(100 * count, generator=torch.Generator().manual_seed(count)) ** 3
    return values[values.abs().topk(count).indices.sort().values] * scale


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 1000])
def test_trits_hold_every_vote_five_to_a_byte(count: int) -> None:
    votes = torch.randint(-1, 2, (count,), generator=torch.Generator().manual_seed(3)).to(torch.float32)
    codes, scale = Trits().encode(votes)
    assert codes.nbytes == Trits().num_bytes(count) == -(-count // 5)
    assert torch.equal(Trits().decode(codes, scale)[:count], votes)


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("exponent", [-126, -60, -20, 0, 20, 60, 126])
def test_rounding_is_relative_at_every_magnitude(name: str, exponent: int) -> None:
    quantize = QUANTIZERS[name]()
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).clamp(-1.9, 1.9) * 2.0**exponent
    codes, scale = quantize.encode(values)
    assert codes.dtype == quantize.code_dtype and scale.dtype == torch.float32 and scale.dim() == 0
    decoded = quantize.decode(codes, scale)
    assert bool(decoded.isfinite().all())
    # fp16 has its full precision from 2^-29 of the largest value up, bf16 for normal numbers; below, an absolute one.
    allowed = RELATIVE[name] * values.abs() + max(2.0 ** (exponent - 38), 2.0**-134)
    assert bool(((decoded - values).abs() <= allowed).all())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_zeros_empties_and_the_largest_float(name: str) -> None:
    quantize = QUANTIZERS[name]()
    for values in (torch.zeros(5), torch.empty(0), torch.full((3,), 3.4028e38), torch.tensor([1e-45, -3e38])):
        codes, scale = quantize.encode(values)
        decoded = quantize.decode(codes, scale)[: values.numel()]
        assert bool(decoded.isfinite().all()) and decoded.shape == values.shape
