"""The reference kernels against definitions that are slow and plain, and the native ones against the reference."""

from __future__ import annotations

import ast
import ctypes
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic import KernelError, kernels
from laconic.kernels import dispatch, key_of, reference
from laconic.kernels.contract import DEFINITIONS, kernels_in
from laconic.kernels.cpu import bits, library, lloyd, low_rank, modulo, rounding, signs, sparse
from laconic.select import SEARCHES
from tests.inputs import SIZES, thin_matrices, vectors

cpu = kernels.module("cpu")
needs_native = pytest.mark.skipif(not library.levels(), reason=library.HOW_TO_GET_THEM)


@pytest.fixture(params=library.levels() or ["none"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set in turn, in place of the machine's best."""
    name = str(request.param)
    if name == "none":
        pytest.skip(library.HOW_TO_GET_THEM)
    chosen: Callable[[], ctypes.CDLL] = lambda: library.load(name)  # noqa: E731
    for module in (bits, lloyd, low_rank, modulo, rounding, signs, sparse):
        monkeypatch.setattr(module, "library", chosen)
    return name


@pytest.fixture
def one_then_two_threads() -> Iterator[tuple[int, int]]:
    before = torch.get_num_threads()
    yield 1, 2
    torch.set_num_threads(before)


def search(x: Tensor, k: int) -> Tensor:
    return kernels.new_search(x.numel(), k)


def ks(n: int) -> list[int]:
    if n > 20_000:
        return [n // 100]  # the reference takes seconds for the others
    return sorted({1, max(1, n // 1000), max(1, n // 100), max(1, n // 2), n})


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal down to the sign of a zero; only the payload of a NaN is free, which differs by instruction set."""
    return (
        a.dtype == b.dtype
        and torch.equal(a.nan_to_num(1.25), b.nan_to_num(1.25))
        and torch.equal(torch.signbit(a), torch.signbit(b))
    )


def _slow_top_k(x: Tensor, k: int) -> list[int]:
    bits = (x.view(torch.int32) & 0x7FFFFFFF).numpy()
    return sorted(np.lexsort((np.arange(bits.size), -bits))[:k].tolist())


@pytest.mark.parametrize("n", SIZES)
def test_the_reference_withdraws_exactly_the_largest_and_the_first_of_ties(n: int) -> None:
    for name, x in vectors(n).items():
        for k in ks(n):
            balance, expected = x.clone(), _slow_top_k(x, k)
            positions, values = reference.withdraw_(balance, None, k, search(x, k))
            assert positions.dtype == torch.int32 and positions.tolist() == expected, (name, k)
            assert same_bits(values, x[expected]) and not balance[expected].any()
            balance[expected] = x[expected]
            assert same_bits(balance, x), (name, k)


@pytest.mark.parametrize("n", SIZES)
def test_native_withdrawal_equals_the_reference(n: int, level: str, one_then_two_threads: tuple[int, int]) -> None:
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(n + 1))
    for name, x in vectors(n).items():
        for k in ks(n):
            for addend, factor in ((None, 1.0), (gradient, 1.0), (gradient, 0.3)):
                expected = x.clone()
                at, values = reference.withdraw_(expected, addend, k, search(x, k), factor=factor)
                for threads in one_then_two_threads:
                    torch.set_num_threads(threads)
                    balance = x.clone()
                    found = cpu.withdraw_(balance, addend, k, search(x, k), factor=factor)
                    assert torch.equal(found[0], at) and same_bits(found[1], values), (name, k, factor, threads)
                    assert same_bits(balance, expected), (name, k, factor, threads)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1000, 4097, 99_991])
def test_native_draws_equal_the_reference_and_are_distinct(n: int, level: str) -> None:
    for k, start in itertools.product(sorted({0, 1, n // 2000, n // 3, n}), (0, n // 2, n - 1)):
        expected, out = (torch.empty(k, dtype=torch.int64) for _ in range(2))
        reference.draw_distinct_(expected, n, start, key_of(3, n, k))
        cpu.draw_distinct_(out, n, start, key_of(3, n, k))
        assert torch.equal(out, expected), (k, start)
        assert bool((out.diff() > 0).all()) and (not k or 0 <= int(out[0]) <= int(out[-1]) < n)
    for backend in (reference, cpu):
        with pytest.raises(KernelError, match="cannot be drawn"):
            backend.draw_distinct_(torch.empty(n + 1, dtype=torch.int64), n, 0, key_of(3))


@pytest.mark.parametrize("rank", [1, 3, 4, 20])
def test_native_bases_equal_the_reference(rank: int, level: str) -> None:
    expected, factors, places = thin_matrices(rank)
    bases = expected.clone()
    reference.orthonormal_(expected, factors, places, rank)
    cpu.orthonormal_(bases, factors, places, rank)
    assert torch.equal(bases[:5], expected[:5])
    torch.testing.assert_close(bases, expected, rtol=0, atol=1e-7 if rank < 20 else 1e-6)  # a sum's order may show
    in_place = factors.clone()
    cpu.orthonormal_(in_place, in_place, places[:, [1, 1, 2]].contiguous(), rank)
    assert bool(in_place.isfinite().all())
    with pytest.raises(KernelError, match="reach beyond"):
        cpu.orthonormal_(bases, factors[1:], places, rank)


@needs_native
def test_several_threads_give_the_bits_of_one(one_then_two_threads: tuple[int, int]) -> None:
    n, k = 3_000_001, 30_000  # large enough for threads to be started
    cases = vectors(n)
    for name in ("normal", "ties", "constant", "zeros", "sorted", "large in one place"):
        results = []
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            balance, memory = cases[name].clone(), search(cases[name], k)
            results.append((*cpu.withdraw_(balance, cases["cubed"], k, memory), balance, memory))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), name
        assert cpu.all_finite(cases[name]) and not cpu.all_finite(cases["nan and inf"])
        torch.set_num_threads(one_then_two_threads[0])


@needs_native
@pytest.mark.parametrize("guess", [0.0, 0.5, 2.0, 1e30, float("inf")])
def test_no_first_threshold_changes_the_result(guess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "FIRST_THRESHOLD", guess)
    for name, x in vectors(100_001).items():
        for k in (1, 1000, 50_000):
            expected, balance, memory = x.clone(), x.clone(), search(x, k)
            at, values = reference.withdraw_(expected, None, k, search(x, k))
            found = cpu.withdraw_(balance, None, k, memory)
            assert torch.equal(found[0], at) and same_bits(found[1], values) and same_bits(balance, expected), name
            assert memory[kernels.PASSES] <= 2  # what is caught with too low a threshold, the second pass sorts out


@needs_native
def test_a_good_first_threshold_costs_one_pass() -> None:
    generator = torch.Generator().manual_seed(1)
    n = 400_000
    layers = torch.randn(n, generator=generator) * torch.logspace(-4, 0, 40).repeat_interleave(n // 40)
    for data in (torch.randn(n, generator=generator), layers, torch.randn(n, generator=generator) ** 3):
        for k in (400, 4000, 40_000):
            balance, memory = torch.zeros(n), search(data, k)
            for _ in range(10):
                cpu.withdraw_(balance, data, k, memory)
            assert memory[kernels.PASSES] == memory[kernels.CALLS] == 10


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_takes_the_same_entries_where_none_are_equal(name: str) -> None:
    for n in (1000, 50_000):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n))
        for k in (1, n // 100, n // 2, n):
            balance, memory = x.clone(), search(x, k)
            positions, values = SEARCHES[name](balance, x, k, memory)
            assert positions.dtype == torch.int32 and positions.tolist() == _slow_top_k(x, k)
            assert torch.equal(values, 2 * x[positions]) and torch.equal(balance.count_nonzero(), torch.tensor(n - k))
            assert memory[kernels.PASSES] >= memory[kernels.CALLS] == 1


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_takes_k_of_anything_finite(name: str) -> None:
    for n in (1, 33, 16_385):
        for case, x in vectors(n).items():
            if case == "nan and inf":
                continue
            for k in ks(n):
                balance = x.clone()
                positions, values = SEARCHES[name](balance, None, k, search(x, k))
                assert positions.numel() == k and bool((positions[1:] > positions[:-1]).all()), (case, k)
                kept = x.clone()
                kept[positions] = 0
                assert torch.equal(values, x[positions]) and torch.equal(balance, kept), (case, k)
                assert values.abs().min() >= balance.abs().max(), (case, k)


@pytest.mark.parametrize("n", SIZES)
def test_native_counts_and_means_equal_the_reference(n: int, level: str) -> None:
    thresholds = torch.tensor([0.0, 1e-41, 0.5, 2.0, 1e30, torch.inf])
    for name, x in vectors(n).items():
        for below in (torch.inf, 2.0**64, 1.0, 2.0**140):
            want = bool((x.abs() < below).all())
            assert cpu.all_finite(x, below) == reference.all_finite(x, below) == want, name
        assert torch.equal(cpu.count_at_least(x, thresholds), reference.count_at_least(x, thresholds)), name
        # Within a block of 4,096 the native sum is in float32, over 16 lanes: 256 roundings.
        torch.testing.assert_close(
            cpu.mean_magnitude(x), reference.mean_magnitude(x), rtol=256 * 2**-24, atol=0, equal_nan=True
        )


def both(name: str) -> list[Callable[..., Tensor]]:
    """The kernel's reference, and its native form where there is one."""
    return [getattr(reference, name), *([getattr(cpu, name)] if library.levels() else [])]


@given(width=st.integers(1, 31), count=st.integers(0, 200), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_lanes_round_trip(width: int, count: int, seed: int) -> None:
    values = torch.randint(2**width, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    for pack in both("pack_lanes"):
        words = pack(values, width)
        assert words.dtype == torch.int32 and torch.equal(words, reference.pack_lanes(values, width))
        assert words.numel() == -(-count * width // 32)
        for unpack in both("unpack_lanes"):
            assert torch.equal(unpack(words, count, width), values)


@given(bits=st.lists(st.booleans(), min_size=1, max_size=200))
@settings(deadline=None)
def test_bits_are_little_endian(bits: list[bool]) -> None:
    positions = torch.tensor([i for i, bit in enumerate(bits) if bit], dtype=torch.int32)
    twice = torch.cat([positions.flip(0), positions])
    for set_bits in both("set_bits"):
        words = set_bits(positions, len(bits))
        assert torch.equal(set_bits(twice, len(bits)), words)
        number = sum((int(w) & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(words))
        assert number == sum(1 << i for i, bit in enumerate(bits) if bit)
        for unpack_bits in both("unpack_bits"):
            assert torch.equal(unpack_bits(words), positions)


@given(n=st.integers(1, 3000), share=st.floats(0, 1), width=st.integers(0, 20), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_elias_fano_is_the_same_code_everywhere(n: int, share: float, width: int, seed: int) -> None:
    k = round(share * n)
    positions = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values.to(torch.int32)
    num_high_bits = k + ((n - 1) >> width)
    expected = reference.encode_elias_fano(positions, width, num_high_bits)
    for encode in both("encode_elias_fano"):
        assert torch.equal(encode(positions, width, num_high_bits), expected)
    damaged = expected.clone()
    if damaged.numel():
        damaged[seed % damaged.numel()] ^= 1 << (seed % 31)
    readings = []
    for decode in both("decode_elias_fano"):
        assert torch.equal(decode(expected, n, k, width), positions)
        readings.append(decode(damaged, n, k, width))
    # What is no code of k positions has another length in both, though not the same one.
    assert all((reading.numel() == k) == (readings[0].numel() == k) for reading in readings)


@given(n=st.integers(1, 30_000), share=st.floats(0, 1), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_rice_is_the_same_code_everywhere(n: int, share: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    k = max(1, round(share**3 * n))
    positions = torch.randperm(n, generator=draw)[:k].sort().values.to(torch.int32)
    if seed % 2:
        positions[k // 2 :] = torch.arange(n - k + k // 2, n)  # dense at the end, so that widths differ
    expected = reference.encode_rice(positions)
    damaged = expected.clone()
    damaged[seed % damaged.numel()] ^= 1 << (seed % 31)
    for encode, decode in zip(both("encode_rice"), both("decode_rice"), strict=True):
        assert torch.equal(encode(positions), expected)
        assert torch.equal(decode(expected, n, k), positions)
        for words, count in ((damaged, k), (expected[:-1], k), (expected, k + 1), (expected, k + 64)):
            assert torch.equal(decode(words, n, count), reference.decode_rice(words, n, count))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", range(3, 9))
def test_remainders_tell_what_lies_between_and_notice_where_they_cannot(n: int, bits: int, level: str) -> None:
    draw = torch.Generator().manual_seed(n + bits)
    x = torch.randn(n, generator=draw)
    steps = 2.0 ** torch.randint(-12, -6, (-(-n // 256),), generator=draw)
    allowed = (2 ** (bits - 1) - 1.01) * steps.repeat_interleave(256)[:n]
    y = x + allowed * (2 * torch.rand(n, generator=draw) - 1)
    far = n // 2
    y[far] += 10 * allowed[far] + 40
    found = []
    for code in (reference, cpu):
        assert all(map(torch.equal, code.largest_changes(y, x), reference.largest_changes(y, x)))
        codes, sums = code.encode_modulo(y, steps, 0.375, bits)
        assert codes.numel() == -(-n // 8) * bits
        moves, told, peaks = code.compare_modulo(x, codes, sums, steps, 0.375, bits)
        back = code.decode_differences(told, steps, n, bits - 1)
        assert torch.equal(back, -moves)  # the sum of x and y is unchanged, also where they are far apart
        room = torch.full((n,), torch.nan)
        assert code.decode_differences(told, steps, n, bits - 1, out=room) is room and torch.equal(room, back)
        assert torch.equal(code.compare_modulo(x, codes, sums, steps, 0.375, bits, out=room)[0], moves)
        found.append((codes, sums, moves, told, peaks))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    missed = (peaks < 0).repeat_interleave(256)[:n]
    assert missed[far] and int((peaks < 0).sum()) == 1 and not moves[missed].any()
    step, most = steps.repeat_interleave(256)[:n], 2 ** (bits - 2) - 1
    near, cut = (2 * moves - (y - x)).abs() <= step, (2 * moves.abs() == most * step) & ((y - x) * moves > 0)
    assert (near | cut)[~missed].all() and int(peaks.max()) < 2 ** (bits - 1)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_what_a_writer_left_after_the_last_code_is_not_read(bits: int, level: str) -> None:
    x = torch.zeros(13)
    codes, sums = reference.encode_modulo(x, torch.ones(1), 0.5, bits)
    codes[-1] |= 0x80  # of the sixteenth lane
    for code in (reference, cpu):
        _, _, peaks = code.compare_modulo(x, codes, sums, torch.ones(1), 0.5, bits)
        assert peaks.tolist() == [0]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_models_that_only_seem_alike_are_found_out(bits: int, level: str) -> None:
    x, wrap = torch.zeros(256), 2.0**bits
    opposite, uniform, beyond = x.clone(), x + 2.0**20, x + 1e30
    opposite[3], opposite[131] = wrap, -wrap  # whose remainders are those of zero, like the others'
    for y in (opposite, uniform, beyond, x - 2.0**16):
        for code in (reference, cpu):
            told = code.encode_modulo(y, torch.ones(1), 0.5, bits)
            moves, differences, peaks = code.compare_modulo(x, *told, torch.ones(1), 0.5, bits)
            assert peaks.tolist() == [-1] and not moves.any() and not differences.any()


@pytest.mark.parametrize("n", SIZES[:-1])
def test_signs_sums_and_votes_equal_the_reference(n: int, level: str) -> None:
    cases = vectors(n)
    ballots = []
    for name, x in cases.items():
        words = reference.pack_signs(x)
        assert torch.equal(cpu.pack_signs(x), words), name
        for some in (words, words[1:], words.repeat(2).view(2, -1)):
            assert torch.equal(cpu.check_sum(some), reference.check_sum(some)), name
        for scale in (1.0, 0.25):
            signs_again = reference.unpack_signs(words, n, scale)
            assert torch.equal(cpu.unpack_signs(words, n, scale), signs_again)
            assert torch.equal(torch.signbit(signs_again), torch.signbit(x))
        ballots.append(words)
    for voters in (1, 2, 3, 4, 8, 9, len(ballots)):
        outcomes = zip(cpu.vote(ballots[:voters]), reference.vote(ballots[:voters]), strict=True)
        assert all(torch.equal(found, expected) for found, expected in outcomes), voters
    ones = torch.stack([reference.unpack_lanes(ballot, n, 1) for ballot in ballots]).sum(0)
    negative, tie = (reference.unpack_lanes(words, n, 1) for words in reference.vote(ballots))
    assert torch.equal(negative == 1, 2 * ones > len(ballots)) and torch.equal(tie == 1, 2 * ones == len(ballots))


@needs_native
@pytest.mark.parametrize("n", [1, 15, 4097, 300_001])
@pytest.mark.parametrize("group", [16, 48, 128, 4096])
def test_two_sizes_of_a_group_equal_the_reference(n: int, group: int, level: str) -> None:
    drawn = torch.randn(n, generator=torch.Generator().manual_seed(n))
    for values in (drawn * drawn.mul(3).exp(), drawn.round(), torch.full((n,), -0.7), 1e-35 * drawn):
        values[::7] *= 0.0  # and -0.0
        top = values.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        lanes, words = expected = reference.encode_lloyd(values, top, group)
        assert all(map(torch.equal, cpu.encode_lloyd(values, top, group), expected))
        decoded = cpu.decode_lloyd(lanes, words, top, group)
        assert same_bits(decoded, reference.decode_lloyd(lanes, words, top, group))


def test_pieces_are_joined_and_added_to(one_then_two_threads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    for sizes in ((1,), (3, 0, 4097), (700_000, 1, 5000)):
        pieces = [torch.randn(size, generator=generator) for size in sizes]
        addend = torch.randn(sum(sizes), generator=generator)
        for threads in one_then_two_threads:
            torch.set_num_threads(threads)
            for code in (reference, cpu):
                out = torch.full_like(addend, torch.nan)
                code.join_(out, pieces)
                assert torch.equal(out, torch.cat(pieces))
                code.join_(out, [out], addend)
                assert torch.equal(out, torch.cat(pieces) + addend)
                code.join_(out, pieces, addend)
                assert torch.equal(out, torch.cat(pieces) + addend)
    with pytest.raises(KernelError, match="out is"):
        cpu.join_(torch.empty(3), [torch.empty(2)])


@needs_native
def test_frames_add_up_in_their_order(one_then_two_threads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    for n, k in ((1, 1), (100, 7), (3_000_000, 100_000)):
        at = [torch.randperm(n, generator=generator)[:k].sort().values.to(torch.int32) for _ in range(5)]
        values = [torch.randn(k, generator=generator) * 10.0**f for f in range(5)]
        expected = torch.randn(n, generator=generator)
        totals = [expected.clone(), expected.clone()]
        reference.add_at_(expected, at, values)
        for total, threads in zip(totals, one_then_two_threads, strict=True):
            torch.set_num_threads(threads)
            cpu.add_at_(total, at, values)
            assert torch.equal(total, expected)


@needs_native
@pytest.mark.parametrize("take", [False, True])
def test_frames_are_summed_over_their_union(take: bool, one_then_two_threads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(4)
    for n, counts in ((1, [1, 0]), (100, [7, 0, 100]), (9000, [0, 0]), (3_000_000, [100_000, 7, 150_000])):
        at = [torch.randperm(n, generator=generator)[:k].sort().values.to(torch.int32) for k in counts]
        values = [torch.randn(k, generator=generator) * 10.0**f for f, k in enumerate(counts)]
        expected = torch.randn(n, generator=generator)
        totals = [expected.clone(), expected.clone()]
        want = reference.sum_over_union_(expected, at, values, take=take)
        for total, threads in zip(totals, one_then_two_threads, strict=True):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, cpu.sum_over_union_(total, at, values, take=take), want))
            assert torch.equal(total, expected)
    for wrong, says in (([3, 9000], "reach from 3 to 9000"), ([5000, 1, 6000], "not ascending")):
        frame = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(KernelError, match=says):
            cpu.sum_over_union_(torch.zeros(9000), [frame], [torch.ones(len(wrong))], take=take)


@pytest.mark.parametrize("n", [0, 1, 7, 1000, 4097, 20_001])
def test_native_rounding_equals_the_reference(n: int, level: str) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[n // 2 : n // 2 + 2] = -0.0
    for group, dtype, (lane_bits, levels) in itertools.product(
        (1, 7, 512, 10**7), (torch.int32, torch.int64), ((3, 1), (6, 7), (7, 15), (16, 4000))
    ):
        norms = reference.largest_magnitudes(x, group)
        assert torch.equal(cpu.largest_magnitudes(x, group), norms)
        inverse = torch.where(norms > 0, levels / norms, torch.zeros_like(norms)) if n else torch.ones(1)
        num_words = -(-n // (dtype.itemsize * 8 // lane_bits))
        grid = (inverse, group, levels, lane_bits, num_words, dtype)
        rows = torch.stack([reference.quantize_pack(x, *grid, key_of(rank)) for rank in range(3)])
        for rank, words in enumerate(rows):
            assert torch.equal(cpu.quantize_pack(x, *grid, key_of(rank)), words), (group, dtype, lane_bits)
        step = norms / levels if n else torch.ones(1)
        values = reference.unpack_scale(rows[0], n, lane_bits, step, group)
        assert torch.equal(cpu.unpack_scale(rows[0], n, lane_bits, step, group), values)
        mean = reference.average_words(rows, lane_bits, key_of(9))
        assert torch.equal(cpu.average_words(rows, lane_bits, key_of(9)), mean)


@needs_native
def test_a_raw_pointer_is_never_given_what_would_crash() -> None:
    x, wide = torch.randn(10), torch.randn(10, dtype=torch.float64)
    before = x.clone()

    def add_at(wrong: list[int]) -> None:
        both = [torch.tensor(at, dtype=torch.int32) for at in ([1, 2], wrong)]
        cpu.add_at_(x, both, [torch.ones(at.numel()) for at in both])

    for call in (
        lambda: cpu.withdraw_(wide, None, 1, search(x, 1)),
        lambda: cpu.withdraw_(torch.randn(20)[::2], None, 1, search(x, 1)),
        lambda: cpu.withdraw_(torch.randn(2, 5), None, 1, search(x, 1)),
        lambda: cpu.withdraw_(x, x, 1, search(x, 1)),
        lambda: cpu.withdraw_(x, torch.randn(9), 1, search(x, 1)),
        lambda: cpu.withdraw_(x, None, 11, search(x, 1)),
        lambda: cpu.withdraw_(x, None, 0, search(x, 1)),
        lambda: add_at([10]),
        lambda: add_at([-1]),
        lambda: add_at([3, 5, -1]),
        lambda: add_at([100, 3]),
        lambda: cpu.add_at_(x, [torch.tensor([1], dtype=torch.int32)], [torch.ones(2)]),
        lambda: cpu.set_bits(torch.tensor([32], dtype=torch.int32), 32),
        lambda: cpu.encode_elias_fano(torch.tensor([32], dtype=torch.int32), 2, 8),
        lambda: cpu.encode_rice(torch.tensor([3, 2], dtype=torch.int32)),
        lambda: cpu.vote([]),
        lambda: cpu.encode_lloyd(x, torch.ones(()), 8192),
        lambda: cpu.decode_lloyd(*torch.split(torch.ones(3, dtype=torch.int32), [1, 2]), torch.ones(()), 16),
        lambda: cpu.quantize_pack(x, torch.ones(2), 512, 7, 6, 2, torch.int32, (1, 2)),
        lambda: cpu.quantize_pack(x, torch.ones(1), 512, 7, 6, 1, torch.int32, (1, 2)),
        lambda: cpu.unpack_scale(torch.ones(1, dtype=torch.int32), 6, 6, torch.ones(1), 512),
    ):
        with pytest.raises(KernelError, match="give") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert torch.equal(x, before)  # whatever was right about it


def test_finite() -> None:
    big = torch.full((10,), 3e38)  # whose sum overflows
    assert kernels.all_finite(big) and kernels.all_finite(torch.empty(0))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 5, 9):
            x = big.clone()
            x[place] = bad
            assert not kernels.all_finite(x) and not reference.all_finite(x)
            assert not kernels.all_finite(x, 2.0**140) and not reference.all_finite(x, 2.0**140)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels.all_finite(torch.full((3,), 6e4, dtype=dtype), 2.0**64)
    assert not kernels.all_finite(big, 2.0**64) and not kernels.all_finite(big.bfloat16(), 2.0**64)


def test_a_backend_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_KERNELS", raising=False)
    assert kernels.backend() == ("cpu" if library.levels() else "reference")
    for asked, cure in (("fast", "write one of reference, cpu, gpu"), ("gpu", "triton|leave it unset")):
        monkeypatch.setenv("LACONIC_KERNELS", asked)
        with pytest.raises(KernelError, match=cure):
            kernels.backend()
    monkeypatch.setenv("LACONIC_KERNELS", "reference")
    assert kernels.backend("cpu") == kernels.backend("cuda") == "reference"


def test_without_native_kernels_the_reference_runs_and_how_to_get_them_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "level", lambda: None)
    dispatch._backend.cache_clear()
    assert kernels.backend("cpu") == "reference" and "C++17 compiler" in (kernels.missing("cpu") or "")
    monkeypatch.setenv("LACONIC_KERNELS", "reference")
    assert kernels.missing("cpu") is None  # it was asked for
    monkeypatch.setenv("LACONIC_KERNELS", "cpu")
    with pytest.raises(KernelError, match="install a C\\+\\+17 compiler"):
        kernels.missing("cpu")
    dispatch._backend.cache_clear()


@pytest.mark.skipif(not library.levels(), reason="no native kernels were built")
def test_kernels_built_from_other_sources_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INTERFACE", -1)
    with pytest.raises(KernelError, match="reinstall laconic"):
        library.load.__wrapped__(library.levels()[0])


def _functions(backend: str) -> dict[str, list[str]]:
    """Names of the parameters of every function of a backend's files; read, not run, as triton may not be installed."""
    files = (Path(kernels.__file__).parent / backend).glob("*.py")
    nodes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)] for node in nodes}


def _taken_from_reference(backend: str) -> dict[str, str]:
    """What a backend says it has no code of its own for, and why."""
    init = ast.parse((Path(kernels.__file__).parent / backend / "__init__.py").read_text())
    return next((ast.literal_eval(node.value) for node in init.body if isinstance(node, ast.Assign)), {})


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_backend_has_every_kernel_under_its_own_signature_or_says_why_not(backend: str) -> None:
    own = _functions(backend)
    taken = _taken_from_reference(backend)
    for name, definition in DEFINITIONS.items():
        assert (name in own) != (name in taken), name
        assert name in taken or own[name] == list(inspect.signature(definition).parameters), name
    assert taken.keys() <= DEFINITIONS.keys() and all(taken.values())


def test_kernels_are_declared_once_and_a_backend_without_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(getattr(reference, name) is definition for name, definition in DEFINITIONS.items())
    assert all(getattr(kernels, name).__wrapped__ is definition for name, definition in DEFINITIONS.items())

    def halve_(x: Tensor) -> None:
        x *= 0.5

    monkeypatch.setitem(DEFINITIONS, "halve_", halve_)
    with pytest.raises(KernelError, match="has no halve_; write it there"):
        kernels_in(cpu.__name__, cpu.TAKEN_FROM_REFERENCE)
    assert kernels_in(cpu.__name__, [*cpu.TAKEN_FROM_REFERENCE, "halve_"])["halve_"] is halve_
