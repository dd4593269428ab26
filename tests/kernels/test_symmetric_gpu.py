"""The Triton kernel of symmetric products against products in float32, on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.reference import symmetric as reference
from tests.kernels.on_gpu import DEVICE, ON_CUDA

from laconic.kernels.gpu import symmetric as gpu  # isort: skip - after the skip, as it imports triton

pytestmark = ON_CUDA  # which has tensor cores


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (5, 130), (128, 64), (200, 72), (256, 512), (768, 768), (600, 1000)])
def test_it_is_the_product_in_float32_and_mirrored(size: tuple[int, int], tall: bool) -> None:
    rows, inner = size
    x = _drawn(3, inner, rows).mT if tall else _drawn(3, rows, inner)
    addend = _drawn(3, rows, rows)
    addend = (addend + addend.mT) / 2
    factors = torch.tensor([0.5, 2.0, 1e-3], device=DEVICE)
    out = torch.full((3, rows, rows), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    for given, added in ((None, None), (factors, None), (None, addend), (factors, addend)):
        scale = {"alpha": 2.0, "beta": -0.5, "diagonal": 3.0}
        gpu.symmetric_product_(out, x, x, given, addend=added, **scale)
        want = torch.empty_like(out, dtype=torch.float32)
        whole = None if added is None else added.float()
        reference.symmetric_product_(want, x.float(), x.float(), given, addend=whole, **scale)
        assert (out.float() - want).norm() <= 4e-3 * want.norm()
        assert torch.equal(out[:, 128:, :128], out[:, :128, 128:].mT)  # the tiles beside those on the diagonal


def test_what_is_not_for_tensor_cores_is_torchs_and_strides_are_refused() -> None:
    x = torch.randn(2, 8, 20, device=DEVICE)
    got, want = torch.empty(2, 8, 8, device=DEVICE), torch.empty(2, 8, 8, device=DEVICE)
    gpu.symmetric_product_(got, x, x, alpha=0.5)
    reference.symmetric_product_(want, x, x, alpha=0.5)
    assert torch.equal(got, want)
    with pytest.raises(KernelError, match="give contiguous"):
        gpu.symmetric_product_(_drawn(8, 2, 8).transpose(0, 1), _drawn(2, 8, 20), _drawn(2, 8, 20))
