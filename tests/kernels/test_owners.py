"""What owners are told, say and are heard to say: native calls against the reference, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from laconic import KernelError, kernels
from laconic.exchange import Shares, piece_borders
from laconic.kernels import Blocks, Pieces, give_threads, reference
from laconic.kernels.cpu import library, owners
from laconic.kernels.reference.owners import HEAD_WORDS
from laconic.layout import Layout

cpu = kernels.module("cpu")
pytestmark = pytest.mark.skipif(not library.levels(), reason=library.HOW_TO_GET_THEM)

HEAD = list(range(HEAD_WORDS))
LAYOUT = Layout.of(["a", "small", "none", "b", "c"], [3000, 9, 0, 20_000, 6])
FIXED = [span for span in LAYOUT.spans if 0 < span.num_entries < 10]


@pytest.fixture(params=[(name, threads) for name in library.levels() for threads in (1, 3)], autouse=True)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each instruction set, in one thread and in several, however little there is to do."""
    name, threads = request.param
    chosen: Callable[[], ctypes.CDLL] = lambda: library.load(name)  # noqa: E731
    monkeypatch.setattr(owners, "library", chosen)
    give_threads(threads)
    yield
    give_threads(0)


def _positions(n: int, k: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values.to(torch.int32)


def _values(count: int, seed: int) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 100
    extremes = torch.tensor([3.4e38, -3.4e38, 1e-45, -0.0, 1.00390625, 1.01171875])
    values[: min(6, count)] = extremes[: min(6, count)]
    return values


def _blocks(frame: Tensor, n: int, k: int, num_values: int) -> Blocks:
    return Blocks(frame.numel() // 4 - HEAD_WORDS - -(-num_values // 2), n, k, num_values)


@pytest.mark.parametrize(("n", "k", "num_fixed"), [(2, 1, 0), (1000, 64, 3), (50_000, 20_000, 0), (1 << 30, 333, 8)])
def test_frames_are_the_reference_s(n: int, k: int, num_fixed: int) -> None:
    positions = [(_positions(min(n, 1 << 20), k, seed) + max(0, n - (1 << 20))) for seed in range(3)]
    values = [_values(num_fixed + k, seed) for seed in range(3)]
    want = reference.write_rice_frames(positions, values, [HEAD] * 3)
    found = cpu.write_rice_frames(positions, values, [HEAD] * 3)
    for one, other in zip(found, want, strict=True):
        assert all(map(torch.equal, one, other))
    written = [frame for frame, _ in found]
    blocks = [_blocks(frame, n, k, num_fixed + k) for frame in written]
    for backend in (cpu, reference):
        read = backend.read_rice_frames(written, blocks)
        for (at, what), positions_of_it, (_, said) in zip(read, positions, want, strict=True):
            assert torch.equal(at, positions_of_it) and torch.equal(what, said)
    damaged = written[1].clone()
    damaged[-3] ^= 1
    for backend in (cpu, reference):
        assert backend.read_rice_frames([written[0], damaged], blocks[:2]) is None


def _pieces(num_owners: int) -> Pieces:
    shares = Shares(LAYOUT, num_owners)
    cuts = torch.tensor([piece_borders(span.num_entries, num_owners) for span in FIXED])
    return Pieces(*shares.pieces(torch.device("cpu")), cuts.diff())


def _bucket(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fixed positions, k chosen ones, and values at all of these."""
    fixed = torch.cat([torch.arange(span.start, span.stop) for span in FIXED])
    free = torch.ones(LAYOUT.num_entries, dtype=torch.bool)
    free[fixed] = False
    chosen = free.nonzero().squeeze(1)[_positions(int(free.sum()), k, 5).long()].to(torch.int32)
    return fixed, chosen, _values(fixed.numel() + k, 6)


@pytest.mark.parametrize("num_owners", [1, 2, 5])
def test_parts_and_what_owners_say_are_the_reference_s(num_owners: int) -> None:
    """What is told in parts and answered as it was heard comes back to where it was."""
    pieces = _pieces(num_owners)
    fixed, chosen, values = _bucket(1500)
    heads = [HEAD] * num_owners
    said = [torch.empty_like(values) for _ in range(2)]
    parts = cpu.write_parts(chosen, values, pieces, heads, said[0])
    want = reference.write_parts(chosen, values, pieces, heads, said[1])
    assert want is not None and all(map(torch.equal, parts, want)) and torch.equal(*said)
    num_fixed = pieces.fixed_lengths.sum(0).tolist()
    counts = [int(part.view(torch.int32)[5]) for part in parts]
    sizes = [own.num_entries for own in Shares(LAYOUT, num_owners).layouts]
    blocks = [_blocks(part, n, k, k + more) for part, n, k, more in zip(parts, sizes, counts, num_fixed, strict=True)]
    for backend in (cpu, reference):
        positions, heard = torch.empty(chosen.numel(), dtype=torch.int64), torch.empty_like(values)
        assert backend.read_answers(parts, blocks, pieces, positions, heard)
        assert torch.equal(positions, chosen.long())
        assert torch.equal(heard[fixed.numel() :], said[0][fixed.numel() :])
        assert torch.equal(heard[: fixed.numel()].sort().values, said[0][: fixed.numel()].sort().values)
        assert not backend.read_answers([part ^ 1 for part in parts], blocks, pieces, positions, heard)


def test_an_owner_of_nothing_that_was_chosen_is_told_another_way() -> None:
    pieces = _pieces(5)
    _, chosen, values = _bucket(3)
    for backend in (cpu, reference):
        assert backend.write_parts(chosen, values, pieces, [HEAD] * 5, torch.empty_like(values)) is None


@pytest.mark.parametrize("windows", [[], [(0, 20_000, 700)], [(0, 5000, 100), (5000, 5000, 1), (5000, 20_000, 5000)]])
@pytest.mark.parametrize("spare", [[], [(0, 2500), (2500, 3000), (3000, 20_000)]])
def test_means_are_the_reference_s(windows: list[tuple[int, int, int]], spare: list[tuple[int, int]]) -> None:
    n = 20_000
    fixed = torch.tensor([7, 8, 9, 15_000])
    positions = [_positions(2400, 300, seed) + 10 for seed in range(2)] + [_positions(n - 16_000, 900, 3) + 16_000]
    values = [_values(fixed.numel() + at.numel(), seed) for seed, at in enumerate(positions)]
    values[1][50], values[2][-1] = 3e38, 3e38  # of which one meets the like
    held = torch.randn(n, generator=torch.Generator().manual_seed(9))
    held[positions[0][46].long()], held[15_999] = 3e38, 1e9
    balances = [held.clone() for _ in range(2)]
    found = []
    for backend, balance in zip((cpu, reference), balances, strict=True):
        searches = [kernels.new_search(max(1, stop - start), room) for start, stop, room in windows]
        places, means = backend.take_mean_(balance, fixed, positions, values, windows, searches, spare)
        said = means.to(torch.bfloat16).to(torch.float32)
        backend.owe_(balance, fixed, places, means, said, 3.0)
        found.append((places, means))
    assert all(map(torch.equal, *found)) and torch.equal(*balances)
    assert bool(found[0][1].isfinite().all())


def test_what_would_crash_is_refused() -> None:
    at, what, held = torch.tensor([1, 2], dtype=torch.int32), torch.ones(2), torch.zeros(10)
    none = torch.empty(0, dtype=torch.int64)
    (frame, _), *_ = cpu.write_rice_frames([at], [what], [HEAD])
    calls: list[Callable[[], object]] = [
        lambda: cpu.write_rice_frames([at[:0]], [what[:0]], [HEAD]),
        lambda: cpu.write_rice_frames([at.flip(0)], [what], [HEAD]),
        lambda: cpu.read_rice_frames([frame], [Blocks(9, 10, 2, 3)]),
        lambda: cpu.write_parts(at, torch.ones(1), _pieces(1), [HEAD], torch.ones(1)),
        lambda: cpu.write_parts(at, torch.ones(19), _pieces(1), [HEAD], torch.ones(1)),
        lambda: cpu.take_mean_(held, none, [at + 9], [what], [], []),
        lambda: cpu.take_mean_(held, none, [at], [what[:1]], [], []),
        lambda: cpu.take_mean_(held, none, [at], [what], [(0, 11, 1)], [kernels.new_search(10, 1)]),
        lambda: cpu.take_mean_(held, torch.tensor([10]), [at], [torch.ones(3)], [], []),
        lambda: cpu.owe_(held, none, at + 9, what, what, 1.0),
        lambda: cpu.owe_(held, none, at, what, what[:1], 1.0),
    ]
    for call in calls:
        with pytest.raises(KernelError, match="give"):
            call()
