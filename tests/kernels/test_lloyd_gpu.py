"""The Triton kernels of two bits a value against the reference: on a CUDA device, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from laconic import KernelError
from laconic.kernels.reference import lloyd as reference
from tests.kernels.on_gpu import DEVICE, INTERPRETED, same, usable_interpreter  # noqa: F401 - and its skip

from laconic.kernels.gpu import lloyd as gpu  # isort: skip - after the skip, as it imports triton

LENGTHS = (1, 15, 5003) if INTERPRETED else (1, 15, 16, 127, 128, 129, 4097, 2_000_003)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("group", (16, 48, 128, 4096))
def test_two_sizes_of_a_group_equal_the_reference(n: int, group: int) -> None:
    drawn = torch.randn(n, generator=torch.Generator().manual_seed(n))
    for values in (drawn * drawn.mul(3).exp(), drawn.round(), torch.full((n,), -0.7), 1e-35 * drawn):
        values[::7] *= 0.0  # and -0.0
        top = values.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        lanes, words = expected = reference.encode_lloyd(values, top, group)
        assert all(map(same, gpu.encode_lloyd(values.to(DEVICE), top.to(DEVICE), group), expected))
        decoded = gpu.decode_lloyd(lanes.to(DEVICE), words.to(DEVICE), top.to(DEVICE), group)
        assert same(decoded, reference.decode_lloyd(lanes, words, top, group))


def test_what_is_no_group_or_of_another_length_is_refused() -> None:
    x = torch.zeros(300, device=DEVICE)
    with pytest.raises(KernelError, match="a group of 20 values"):
        gpu.encode_lloyd(x, x[0], 20)
    with pytest.raises(KernelError, match="lanes is"):
        gpu.decode_lloyd(x[:2].to(torch.int32), torch.zeros(19, dtype=torch.int32, device=DEVICE), x[0], 128)
