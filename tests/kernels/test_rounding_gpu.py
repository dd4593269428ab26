"""The Triton kernels of integers on a grid against the reference: on a CUDA device, or with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import KernelError
from laconic.kernels import key_of
from laconic.kernels.reference import rounding as reference
from tests.inputs import vectors
from tests.kernels.on_gpu import DEVICE, INTERPRETED, ON_CUDA, same, usable_interpreter  # noqa: F401 - and its skip

from laconic.kernels.gpu import rounding as gpu  # isort: skip - after the skip, as it imports triton

KEY = key_of(1, 2, 3)
WORDS = (torch.int32, torch.int64)
GENERATOR = torch.Generator().manual_seed(2)


def scales_for(x: Tensor, group: int, levels: int) -> tuple[Tensor, Tensor]:
    """(inverse, step) of a max-norm grid; 0 where a group is zero."""
    norms = reference.largest_magnitudes(x, group)
    return torch.where(norms > 0, levels / norms, 0.0), norms / levels


def packing_agrees(
    x: Tensor, inverse: Tensor, group: int, levels: int, lane_bits: int, num_words: int, dtype: torch.dtype
) -> Tensor:
    """Pack by both; returns the words."""
    arguments = group, levels, lane_bits, num_words, dtype, KEY
    want = reference.quantize_pack(x, inverse, *arguments)
    assert same(gpu.quantize_pack(x.to(DEVICE), inverse.to(DEVICE), *arguments), want)
    return want


def unpacking_agrees(words: Tensor, count: int, lane_bits: int, step: Tensor, group: int) -> None:
    want = reference.unpack_scale(words, count, lane_bits, step, group)
    assert same(gpu.unpack_scale(words.to(DEVICE), count, lane_bits, step.to(DEVICE), group), want)


def any_words(dtype: torch.dtype, *shape: int) -> Tensor:
    """Words of any bits, also such as no codes give."""
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=GENERATOR, dtype=dtype)


@pytest.mark.parametrize("n", (1, 31, 5003, 20_001))
def test_largest_magnitudes(n: int) -> None:
    some = ("normal", "zeros", "nan and inf", "denormal") if n < 20_000 else ("normal",)
    for name in some:
        x = vectors(n)[name]
        for group in (1, 3, 16, 512, 1000, 4096, 4097, 10_000, n, n + 7):
            assert same(gpu.largest_magnitudes(x.to(DEVICE), group), reference.largest_magnitudes(x, group))


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("lane_bits", range(3, 17))
def test_rounding_and_packing(lane_bits: int, dtype: torch.dtype) -> None:
    lanes, levels = dtype.itemsize * 8 // lane_bits, 2 ** (lane_bits - 1) - 1
    n = lanes * 300 - 3
    groups = ((1, 512), (1000, n + 5), (16, n // 2 + 1))[lane_bits % 3]
    for group, num_words in zip(groups, (300, 303), strict=True):  # aligned or not, and with room to spare
        x = torch.randn(n, generator=GENERATOR) ** 3
        inverse, step = scales_for(x, group, levels)
        words = packing_agrees(x, inverse, group, levels, lane_bits, num_words, dtype)
        unpacking_agrees(words, n, lane_bits, step, group)
        unpacking_agrees(any_words(dtype, num_words), lanes * num_words - 1, lane_bits, torch.tensor([0.3]), 1)


@pytest.mark.parametrize("n", (1, 2, 33, 4096, 9001))
def test_blocks_of_words(n: int) -> None:
    """From one word to several programs; whole ones, and those where a lane, or the words, end."""
    for dtype, lane_bits, group in ((torch.int32, 12, 1000), (torch.int64, 16, 512)):
        lanes = dtype.itemsize * 8 // lane_bits
        x = torch.randn(n, generator=GENERATOR)
        inverse, step = scales_for(x, group, 7)
        for num_words in (-(-n // lanes), -(-n // (4 * lanes)) * 4, n):
            unpacking_agrees(
                packing_agrees(x, inverse, group, 7, lane_bits, num_words, dtype), n, lane_bits, step, group
            )


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter's numpy: the place of 1e38 may be infinite
@pytest.mark.parametrize("levels", (1, 7, 32767))
def test_values_at_the_limit(levels: int) -> None:
    norm = torch.tensor(1.7)
    above = norm.nextafter(torch.tensor(torch.inf))
    x = torch.stack([norm, -norm, above, -above, 2 * norm, -1e38 * norm, norm * 0, norm * -0.0, norm * 1e-44])
    x = x.repeat(101)
    for inverse in (levels / norm, (levels / norm).nextafter(torch.tensor(torch.inf)), torch.tensor(1e5), norm * 0):
        words = packing_agrees(x, inverse.view(1), 909, levels, 16, 455, torch.int32)
        assert bool((reference.unpack_scale(words, 909, 16, torch.ones(1), 909).abs() <= levels).all())
    # Whole places are never rounded up, and those an ulp above one nearly never.
    whole = torch.arange(-levels, levels + 1, max(1, levels // 50)).float()
    packing_agrees(whole, torch.ones(1), 1, levels, 16, whole.numel(), torch.int64)
    packing_agrees(whole, torch.tensor([1.0]).nextafter(torch.tensor(2.0)), 1, levels, 16, whole.numel(), torch.int64)


def test_zeros_and_unused_lanes() -> None:
    for dtype in WORDS:
        for x in (torch.zeros(1000), torch.full((1000,), -0.0)):
            assert not packing_agrees(x, torch.zeros(2), 512, 7, 4, 300, dtype).any()
        unpacking_agrees(torch.zeros(300, dtype=dtype), 1000, 4, torch.tensor([0.5, -0.5]), 512)
        empty = torch.zeros(0)
        for num_words in (0, 5):
            for inverse in (torch.ones(1), empty):
                packing_agrees(empty, inverse, 512, 7, 4, num_words, dtype)
            unpacking_agrees(torch.zeros(num_words, dtype=dtype), 0, 4, torch.ones(1), 512)
        assert gpu.average_words(torch.zeros(3, 0, dtype=dtype, device=DEVICE), 4, KEY).shape == (0,)
    assert gpu.largest_magnitudes(empty.to(DEVICE), 512).shape == (0,)


def test_slices_that_are_not_aligned() -> None:
    x, n = torch.randn(4100, generator=GENERATOR), 4097
    here = x.to(DEVICE)
    for start in (1, 2, 3):
        part, there = x[start : start + n], here[start : start + n]
        for group in (512, n):
            want = reference.largest_magnitudes(part, group)
            assert same(gpu.largest_magnitudes(there, group), want)
            words = reference.quantize_pack(part, 7 / want, group, 7, 4, 516, torch.int32, KEY)
            assert same(gpu.quantize_pack(there, (7 / want).to(DEVICE), group, 7, 4, 516, torch.int32, KEY), words)


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize(("num_rows", "lane_bits"), ((1, 3), (2, 5), (3, 4), (7, 8), (64, 11), (200, 16)))
def test_means_of_rows(num_rows: int, lane_bits: int, dtype: torch.dtype) -> None:
    for num_words in (1, 301) if num_rows < 64 else (301,):
        words = any_words(dtype, num_rows, num_words)
        assert same(gpu.average_words(words.to(DEVICE), lane_bits, KEY), reference.average_words(words, lane_bits, KEY))
    levels, count = 2 ** (lane_bits - 1) - 1, 100
    x = torch.randn(num_rows, count, generator=GENERATOR)
    x[:, ::4], x[:, 1::4] = 9.0, -9.0  # the largest totals there are
    words = torch.stack(
        [reference.quantize_pack(row, torch.ones(1), count, levels, lane_bits, count, dtype, KEY) for row in x]
    )
    assert same(gpu.average_words(words.to(DEVICE), lane_bits, KEY), reference.average_words(words, lane_bits, KEY))


def test_a_product_divides() -> None:
    for group in (2, 3, 5, 7, 512, 641, 1000, 1023, 1025, 65_537, 6_700_417, 2**30 - 1, 2**30, 2**30 + 1):
        magic, shift, _ = gpu.division("scales", torch.ones(2), group, group + 1)
        assert 2**31 <= magic + 2**32 < 2**32
        last = (2**31 - 1) // group * group
        for position in (0, 1, group - 1, group, 2 * group - 1, last - 1, last, 2**31 - 1):
            assert position * (magic + 2**32) >> 32 + shift == position // group


def test_arguments_are_checked() -> None:
    x, one = torch.randn(100, device=DEVICE), torch.ones(1, device=DEVICE)
    words = torch.zeros(2, 50, dtype=torch.int32, device=DEVICE)
    wrong: list[Callable[[], Any]] = [
        lambda: gpu.largest_magnitudes(x.double(), 5),
        lambda: gpu.largest_magnitudes(x[::2], 5),
        lambda: gpu.quantize_pack(x[::2], one, 100, 7, 4, 13, torch.int32, KEY),
        lambda: gpu.quantize_pack(x, one, 100, 7, 4, 12, torch.int32, KEY),
        lambda: gpu.quantize_pack(x, one, 100, 7, 4, 50, torch.int16, KEY),
        lambda: gpu.quantize_pack(x, one, 100, 7, 17, 100, torch.int32, KEY),
        lambda: gpu.quantize_pack(x, x[:3], 50, 7, 4, 13, torch.int32, KEY),
        lambda: gpu.unpack_scale(words[0], 401, 4, one, 401),
        lambda: gpu.unpack_scale(words[0], 400, 4, x[:3], 100),
        lambda: gpu.unpack_scale(words[:, 0], 2, 4, one, 1),
        lambda: gpu.average_words(words.T, 4, KEY),
        lambda: gpu.average_words(words[:0], 4, KEY),
    ]
    for call in wrong:
        with pytest.raises(KernelError, match="give"):
            call()


@ON_CUDA
@pytest.mark.parametrize("n", (50_000_000, 100_000_007))
def test_large_buckets(n: int) -> None:
    x = torch.randn(n, device=DEVICE)
    for dtype, lane_bits, group in ((torch.int32, 4, n), (torch.int32, 4, 512), (torch.int64, 5, 1000)):
        num_words = -(-n // (dtype.itemsize * 8 // lane_bits))
        norms = gpu.largest_magnitudes(x, group)
        assert same(norms, reference.largest_magnitudes(x, group))
        inverse, step = 7 / norms, norms / 7
        words = gpu.quantize_pack(x, inverse, group, 7, lane_bits, num_words, dtype, KEY)
        assert same(words, reference.quantize_pack(x, inverse, group, 7, lane_bits, num_words, dtype, KEY))
        read = gpu.unpack_scale(words, n, lane_bits, step, group)
        assert same(read, reference.unpack_scale(words, n, lane_bits, step, group))
        rows = words[: num_words // 8 * 8].view(8, -1)
        assert same(gpu.average_words(rows, lane_bits, KEY), reference.average_words(rows, lane_bits, KEY))


@ON_CUDA
def test_nothing_waits_for_the_device() -> None:
    x = torch.randn(100_003, device=DEVICE)

    def run() -> None:
        norms = gpu.largest_magnitudes(x, 512)
        words = gpu.quantize_pack(x, 7 / norms, 512, 7, 4, 12_504, torch.int32, KEY)
        gpu.unpack_scale(gpu.average_words(words.view(4, -1), 4, KEY), 25_000, 4, norms[:49], 512)

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
