"""Frames and index codes: what one rank writes, another reads, and a damaged frame is an error."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench_wire import bench_wire
from laconic import FrameError
from laconic.quantize import BF16, QUANTIZERS, Sign
from laconic.wire import (
    INDEX_CODECS,
    Bitmap,
    EliasFano,
    FrameShape,
    Implied,
    Rice,
    floor_bits,
    smallest_index_codec,
)


def _positions(n: int, k: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values.to(torch.int32)


@given(n=st.integers(1, 3000), share=st.floats(0, 1), seed=st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_index_codes_round_trip_at_the_foretold_length(n: int, share: float, seed: int) -> None:
    k = min(n, round(share * n))
    positions = _positions(n, k, seed)
    for codec in INDEX_CODECS:
        if not codec.can_code(n, k):
            continue
        words = codec.encode(positions, n)
        assert words.dtype == torch.int32 and codec.num_words(n, k) in (words.numel(), None)
        assert torch.equal(codec.decode(words, n, k), positions)


@pytest.mark.parametrize(
    "positions",
    [[0], [9], [0, 9], list(range(10)), [3, 4, 5], [0, 1, 8, 9]],
)
def test_index_codes_at_the_edges(positions: list[int]) -> None:
    given_positions = torch.tensor(positions, dtype=torch.int32)
    for codec in (EliasFano, Bitmap):
        assert torch.equal(codec.decode(codec.encode(given_positions, 10), 10, len(positions)), given_positions)


def test_positions_near_the_end_of_int32() -> None:
    n = 2**31 - 1
    positions = torch.tensor([0, 1, 2**24 + 1, 2**30, 2**31 - 3, 2**31 - 2], dtype=torch.int32)
    words = EliasFano.encode(positions, n)
    assert torch.equal(EliasFano.decode(words, n, 6), positions)


def test_the_smallest_code_is_chosen_by_formula() -> None:
    assert smallest_index_codec(1000, 0) is smallest_index_codec(1000, 1000) is Implied
    assert smallest_index_codec(100_000, 1000) is EliasFano
    assert smallest_index_codec(100_000, 50_000) is Bitmap
    for k in range(1, 1000, 37):
        best = min(codec.num_words(1000, k) for codec in (EliasFano, Bitmap))
        assert smallest_index_codec(1000, k).num_words(1000, k) == best
    assert [codec.codec_id for codec in INDEX_CODECS] == [0, 2, 1, 3]  # as old frames have them


@pytest.mark.parametrize("rho", [0.01, 0.001])
def test_bits_per_index_are_within_nine_percent_of_the_floor(rho: float) -> None:
    found = bench_wire(10_000_000, rho)
    assert found.exact
    assert found.floor_bits == pytest.approx(floor_bits(found.n, found.k) / found.k)
    assert found.bits_per_index <= 1.09 * found.floor_bits


def _frame(quantizer: str, n: int = 500, k: int = 20, fixed: int = 3) -> tuple[FrameShape, Tensor, Tensor, Tensor]:
    quantize = QUANTIZERS[quantizer]()
    shape = FrameShape(n, k, fixed, quantize)
    positions = _positions(n, k, 1)
    values = torch.randn(fixed + k, generator=torch.Generator().manual_seed(2))
    codes, scale = quantize.encode(values)
    return (
        shape,
        positions,
        quantize.decode(codes, scale)[: k + fixed],
        shape.write(positions, codes, scale, step=7, bucket=2),
    )


@pytest.mark.parametrize("k,fixed", [(20, 3), (20, 0), (0, 5), (500, 0), (1, 1), (300, 2)])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_frames_round_trip_at_the_foretold_length(quantizer: str, k: int, fixed: int) -> None:
    shape, positions, values, frame = _frame(quantizer, k=k, fixed=fixed)
    assert frame.numel() == shape.num_bytes
    contents = shape.read(frame, step=7, bucket=2, peer=0)
    assert torch.equal(contents.positions, positions) and torch.equal(contents.values, values) and not contents.overflow
    silent = shape.write_overflow(frame.device, step=7, bucket=2)
    assert silent.numel() == shape.num_bytes and shape.read(silent, step=7, bucket=2, peer=0).overflow


@pytest.mark.parametrize("num_frames", [1, 2, 3])
@pytest.mark.parametrize("k", [20, 21, 40])
def test_frames_are_read_in_rows_as_one_by_one(num_frames: int, k: int) -> None:
    """A single row of an odd number of words is contiguous, whatever its stride."""
    shape, positions, values, frame = _frame("none", k=k, fixed=3)
    damaged = torch.zeros(1, dtype=torch.int32)
    rows = shape.read_later(torch.stack([frame] * num_frames), damaged)
    assert not damaged and rows[0].shape == (num_frames, k)
    assert all(torch.equal(row, positions) for row in rows[0]) and all(torch.equal(row, values) for row in rows[1])


def test_frames_are_the_same_bytes_as_ever() -> None:
    digest = hashlib.sha256()
    for n, k, fixed in (
        (500, 0, 3),
        (500, 500, 0),
        (500, 20, 3),
        (500, 400, 7),
        (1, 1, 0),
        (70_000, 700, 0),
        (0, 0, 0),
    ):
        spread = torch.arange(k, dtype=torch.int32) * (n // max(k, 1))
        for quantize in (BF16(), Sign()):
            codes, scale = quantize.encode((torch.arange(k + fixed) % 101 - 50) / 64)
            shape = FrameShape(n, k, fixed, quantize)
            for positions in (spread, torch.arange(k, dtype=torch.int32)):
                for write in (shape.write, shape.write_smallest):
                    digest.update(write(positions, codes, scale, step=3, bucket=1).numpy().tobytes())
            digest.update(shape.write_overflow(scale.device, step=3, bucket=1).numpy().tobytes())
    assert digest.hexdigest()[:16] == "129b7740daf856e3"


@pytest.mark.parametrize("k", [1, 2, 20, 100, 250, 490])
@pytest.mark.parametrize("clustered", [False, True])
def test_rice_frames_round_trip_and_are_no_longer(k: int, clustered: bool) -> None:
    quantize = QUANTIZERS["bf16"]()
    shape = FrameShape(500, k, 3, quantize)
    positions = torch.arange(k, dtype=torch.int32) if clustered else _positions(500, k, 1)
    codes, scale = quantize.encode(torch.randn(3 + k, generator=torch.Generator().manual_seed(2)))
    frame = shape.write_smallest(positions, codes, scale, step=7, bucket=2)
    assert frame.numel() <= shape.num_bytes
    found = FrameShape.of(frame, 500, [quantize], peer=5)
    contents = found.read(frame, step=7, bucket=2, peer=5)
    assert torch.equal(contents.positions, positions) and torch.equal(contents.values, quantize.decode(codes, scale))
    for byte in range(frame.numel()):
        damaged = frame.clone()
        damaged[byte] ^= 1 << byte % 8
        with pytest.raises(FrameError, match="from rank 5"):
            FrameShape.of(damaged, 500, [quantize], peer=5).read(damaged, step=7, bucket=2, peer=5)


def test_rice_is_near_the_floor_for_random_positions() -> None:
    for n, k in ((100_000, 10_000), (1_000_000, 10_000)):
        words = Rice.encode(_positions(n, k, 1), n)
        assert 32 * words.numel() < 1.03 * floor_bits(n, k)


def test_rice_is_under_that_floor_where_some_rows_are_dense() -> None:
    n, draw = 100_000, torch.Generator().manual_seed(1)
    density = torch.tensor([0.5, 0.005]).repeat_interleave(5000).repeat(n // 10_000)
    positions = (torch.rand(n, generator=draw) < density).nonzero().view(-1).to(torch.int32)
    words = Rice.encode(positions, n)
    assert 32 * words.numel() < 0.8 * floor_bits(n, positions.numel())
    assert torch.equal(Rice.decode(words, n, positions.numel()), positions)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_any_flipped_bit_is_an_error_that_names_the_peer(quantizer: str) -> None:
    shape, _, _, frame = _frame(quantizer)
    for byte in range(frame.numel()):
        for bit in (0, 3, 7):
            damaged = frame.clone()
            damaged[byte] ^= 1 << bit
            with pytest.raises(FrameError, match="from rank 5"):
                shape.read(damaged, step=7, bucket=2, peer=5)


@pytest.mark.parametrize("bit", [0, 15, 31])
def test_two_flips_that_are_alike_are_an_error(bit: int) -> None:
    shape, _, _, frame = _frame("none")
    words = frame.view(torch.int32).tolist()
    flip = (1 << bit) - (1 << 32 if bit == 31 else 0)
    for one in range(len(words)):
        for other in range(one):
            damaged = words.copy()
            damaged[one] ^= flip
            damaged[other] ^= flip
            with pytest.raises(FrameError, match="from rank 5"):
                shape.read(torch.tensor(damaged, dtype=torch.int32).view(torch.uint8), step=7, bucket=2, peer=5)


def test_opposite_words_that_change_places_are_an_error() -> None:
    shape = FrameShape(64, 64, 0, QUANTIZERS["none"]())
    values = torch.full((64,), 0.5)
    values[::2] = -0.5  # they differ in the highest bit, whose weight is even among any odd weights
    frame = shape.write(torch.arange(64, dtype=torch.int32), values, torch.ones(()), step=7, bucket=2)
    for place in range(10, 73):
        swapped = frame.view(torch.int32).clone()
        swapped[[place, place + 1]] = swapped[[place + 1, place]]
        with pytest.raises(FrameError, match="check sum"):
            shape.read(swapped.view(torch.uint8), step=7, bucket=2, peer=5)


def test_words_that_change_places_and_values_that_are_not_finite_are_errors() -> None:
    shape, _, _, frame = _frame("none")
    words = frame.view(torch.int32)
    swapped = words.clone()
    swapped[-1], swapped[-2] = words[-2], words[-1]
    with pytest.raises(FrameError, match="check sum"):
        shape.read(swapped.view(torch.uint8), step=7, bucket=2, peer=1)
    values = torch.ones(23)
    values[4] = torch.inf
    bad = shape.write(_positions(500, 20, 1), values, values.new_ones(()), step=7, bucket=2)
    with pytest.raises(FrameError, match="not finite"):
        shape.read(bad, step=7, bucket=2, peer=1)


def test_a_frame_of_another_step_bucket_or_shape_is_an_error() -> None:
    shape, _, _, frame = _frame("bf16")
    for expected, kwargs in {
        "step is 7, not 8": {"step": 8, "bucket": 2},
        "bucket is 2, not 1": {"step": 7, "bucket": 1},
    }.items():
        with pytest.raises(FrameError, match=expected):
            shape.read(frame, **kwargs, peer=1)
    with pytest.raises(FrameError, match="bytes, not"):
        shape.read(frame[:-4], step=7, bucket=2, peer=1)
    other = FrameShape(500, 20, 3, QUANTIZERS["fp16"]())
    with pytest.raises(FrameError, match="version and codecs"):
        other.read(frame, step=7, bucket=2, peer=1)


@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=9, max_size=9), k=st.integers(1, 99))
@settings(max_examples=300, deadline=None)
def test_no_words_make_a_decoder_leave_its_bounds(words: list[int], k: int) -> None:
    n = 100
    for codec in (EliasFano, Bitmap):
        block = torch.tensor(words, dtype=torch.int32)[: codec.num_words(n, k)]
        if block.numel() != codec.num_words(n, k):
            continue
        try:
            positions = codec.decode(block, n, k)
        except FrameError:
            continue
        assert positions.numel() == k and int(positions[0]) >= 0 and int(positions[-1]) < n
        assert bool((positions[1:] > positions[:-1]).all())
