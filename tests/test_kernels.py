"""The reference kernels against definitions that are slow and plain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inputs import SIZES, vectors
from laconic import KernelError, kernels


def _slow_top_k(x: Tensor, k: int) -> list[int]:
    bits = (x.view(torch.int32) & 0x7FFFFFFF).tolist()
    return sorted(sorted(range(len(bits)), key=lambda i: (-bits[i], i))[:k])


@pytest.mark.parametrize("n", SIZES)
def test_top_k_is_exact_and_takes_the_first_of_ties(n: int) -> None:
    for name, x in vectors(n).items():
        for k in sorted({1, max(1, n // 100), max(1, n // 2), n}):
            assert kernels.top_k_positions(x, k).tolist() == _slow_top_k(x, k), (name, k)


@given(width=st.integers(1, 31), count=st.integers(0, 200), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_lanes_round_trip(width: int, count: int, seed: int) -> None:
    values = torch.randint(2**width, (count,), generator=torch.Generator().manual_seed(seed))
    words = kernels.pack_lanes(values, width)
    assert words.dtype == torch.int32 and words.numel() == -(-count * width // 32)
    assert torch.equal(kernels.unpack_lanes(words, count, width), values)


@given(bits=st.lists(st.booleans(), min_size=1, max_size=200))
@settings(deadline=None)
def test_bits_are_little_endian(bits: list[bool]) -> None:
    positions = torch.tensor([i for i, bit in enumerate(bits) if bit], dtype=torch.int64)
    words = kernels.set_bits(positions, len(bits))
    number = sum((int(w) & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(words))
    assert number == sum(1 << i for i, bit in enumerate(bits) if bit)
    assert torch.equal(kernels.unpack_bits(words), positions)


def test_finite() -> None:
    big = torch.full((10,), 3e38)  # whose sum overflows
    assert kernels.all_finite(big) and kernels.all_finite(torch.empty(0))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 5, 9):
            x = big.clone()
            x[place] = bad
            assert not kernels.all_finite(x)


def test_a_backend_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.backend() == "reference"
    monkeypatch.setenv("LACONIC_KERNELS", "gpu")
    with pytest.raises(KernelError, match="this build has reference"):
        kernels.backend()
