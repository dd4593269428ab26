"""The Triton passes of an optimizer's step against the reference, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from laconic.kernels.reference import momentum as reference
from tests.kernels.on_gpu import DEVICE, ON_CUDA

from laconic.kernels.gpu import momentum as gpu  # isort: skip - after the skip, as it imports triton

pytestmark = ON_CUDA  # which has addresses for tables


@pytest.mark.parametrize("stacked", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 80), (16, 1), (7, 9), (1, 1), (2304, 768)])
def test_passes_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype, stacked: torch.dtype) -> None:
    """Bit for bit, as both multiply and add in one rounding; sizes that no vector load fits are torch's own."""
    torch.manual_seed(0)
    gradients = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(3)]
    momenta, params = ([torch.randn(shape, device=DEVICE) for _ in range(3)] for _ in range(2))
    results = []
    for backend in (reference, gpu):
        own_momenta, own_params = [m.clone() for m in momenta], [p.to(dtype, copy=True) for p in params]
        stack = torch.empty(3, *shape, dtype=stacked, device=DEVICE)
        backend.stack_momentum_(own_momenta, gradients, stack, 0.95)
        backend.add_decayed_(own_params, stack, 0.97)
        results.append([*own_momenta, *own_params, stack])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_shards_that_are_not_aligned_are_torchs() -> None:
    flat = torch.randn(33, device=DEVICE)
    want, got = flat.clone(), flat.clone()
    updates = torch.ones(1, 32, device=DEVICE)
    reference.add_decayed_([want[1:]], updates, 0.5)
    gpu.add_decayed_([got[1:]], updates, 0.5)
    assert torch.equal(want, got)
