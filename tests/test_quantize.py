"""What rounding may lose, and that nothing finite becomes infinite."""

from __future__ import annotations

import pytest
import torch

from laconic.quantize import QUANTIZERS

RELATIVE = {"none": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}  # half an ulp; bf16 is cut at its largest value: one ulp


def test_every_quantizer_is_tested() -> None:
    assert set(RELATIVE) == set(QUANTIZERS)
    assert len({q.code_id for q in QUANTIZERS.values()}) == len(QUANTIZERS)


@pytest.mark.parametrize("name", QUANTIZERS)
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
        decoded = quantize.decode(codes, scale)
        assert bool(decoded.isfinite().all()) and decoded.shape == values.shape
