"""The Triton kernels of remainders against the reference: on a CUDA device, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from laconic import KernelError
from laconic.kernels.reference import modulo as reference
from tests.kernels.on_gpu import DEVICE, INTERPRETED, same, usable_interpreter  # noqa: F401 - and its skip

from laconic.kernels.gpu import modulo as gpu  # isort: skip - after the skip, as it imports triton

LENGTHS = (1, 257, 5003) if INTERPRETED else (1, 7, 255, 256, 257, 2048, 2049, 1_000_003)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("bits", range(3, 9))
def test_remainders_are_those_of_the_reference(n: int, bits: int) -> None:
    draw = torch.Generator().manual_seed(n + bits)
    x = torch.randn(n, generator=draw)
    steps = 2.0 ** (torch.randint(-48, -24, (-(-n // 256),), generator=draw) / 4)
    allowed = (2 ** (bits - 1) - 1.01) * steps.repeat_interleave(256)[:n]
    y = x + allowed * (2 * torch.rand(n, generator=draw) - 1)
    y[n // 2] += 10 * allowed[n // 2] + 40  # out of reach
    x[n // 3] = 1e30  # beyond what is counted in steps
    here, there, wide = x.to(DEVICE), y.to(DEVICE), steps.to(DEVICE)
    assert all(map(same, gpu.largest_changes(there, here), reference.largest_changes(y, x)))
    codes, sums = reference.encode_modulo(y, steps, 0.375, bits)
    assert all(map(same, gpu.encode_modulo(there, wide, 0.375, bits), (codes, sums)))
    want = reference.compare_modulo(x, codes, sums, steps, 0.375, bits)
    room = torch.full_like(here, torch.nan)
    asked = here, codes.to(DEVICE), sums.to(DEVICE), wide, 0.375, bits
    assert all(map(same, gpu.compare_modulo(*asked), want))
    assert gpu.compare_modulo(*asked, out=room)[0] is room and same(room, want[0])
    back = reference.decode_differences(want[1], steps, n, bits - 1)
    assert same(gpu.decode_differences(want[1].to(DEVICE), wide, n, bits - 1), back)
    assert same(gpu.decode_differences(want[1].to(DEVICE), wide, n, bits - 1, out=room), back)


def test_remainders_of_another_length_are_refused() -> None:
    x = torch.zeros(300, device=DEVICE)
    with pytest.raises(KernelError, match="steps is"):
        gpu.encode_modulo(x, x[:1], 0.5, 4)
    with pytest.raises(KernelError, match="out is"):
        gpu.decode_differences(torch.zeros(152, dtype=torch.uint8, device=DEVICE), x[:2], 300, 4, out=x[:299])
