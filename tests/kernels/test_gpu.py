"""The Triton kernels against the reference: on a CUDA device, or on the CPU with TRITON_INTERPRET=1.

The interpreter runs the programs of a launch one after the other, so that one that waits for the next waits for ever.
To try that here, each program gets a thread, only one of them runs at a time, and who is next is drawn at every
atomic operation and volatile load.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import KernelError, kernels
from laconic.kernels import reference
from laconic.kernels.contract import CALLS, KTH, MEAN, PASSES, new_search
from laconic.kernels.searches import SEARCHES
from tests.inputs import SIZES, thin_matrices, vectors
from tests.kernels.on_gpu import DEVICE, INTERPRETED, ON_CUDA, interpreter, same, tl, usable_interpreter  # noqa: F401 - and its skip

from laconic.kernels.gpu import launch, sparse, withdraw_stages  # isort: skip - after the skip

gpu = kernels.module("gpu")
LENGTHS = (1, 5000) if INTERPRETED else (*SIZES, 4096, 4097)
GENERATOR = torch.Generator().manual_seed(1)


def steps_agree(x: Tensor, k: int, addends: list[Tensor | None], factor: float = 1.0) -> Tensor:
    """Withdraw from `x` after each addend, by both; returns what the search has come to know."""
    n = x.numel()
    want_balance, want_search = x.cpu().clone(), new_search(n, k)
    balance, search = x.to(DEVICE, copy=True), new_search(n, k, DEVICE)
    for addend in addends:
        here = None if addend is None else addend.to(DEVICE)
        want = reference.withdraw_(want_balance, addend, k, want_search, factor=factor)
        got = gpu.withdraw_(balance, here, k, search, factor=factor)
        assert same(got[0], want[0]) and same(got[1], want[1]) and same(balance, want_balance)
    known = search.cpu()
    torch.testing.assert_close(known[KTH], want_search[KTH], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        known[MEAN], want_search[MEAN], rtol=1e-5, atol=0, equal_nan=True
    )  # float32 partial sums
    assert known[CALLS] == len(addends)
    assert not launch.memory_of(balance.device, 0)[: launch.HEAD.value].any()
    return known


@pytest.mark.parametrize("n", LENGTHS)
def test_withdrawal_equals_the_reference(n: int) -> None:
    for x in vectors(n).values():
        noise = torch.randn(n, generator=GENERATOR) * 0.1
        for k in sorted({1, max(1, n // 2), n} if INTERPRETED else {1, max(1, n // 100), max(1, n // 2), n}):
            steps_agree(x, k, [None, noise], factor=0.7)


@pytest.mark.parametrize("k_share", (0.001, 0.01, 0.1))
def test_a_steady_search_makes_one_pass(k_share: float) -> None:
    n, num_steps = (9000, 12) if INTERPRETED else (3_000_001, 25)  # a balance that starts from zero grows fast at first
    k = max(1, int(k_share * n))
    addends: list[Tensor | None] = [torch.randn(n, generator=GENERATOR) for _ in range(num_steps + 5)]
    passes = [float(steps_agree(torch.zeros(n), k, addends[:count])[PASSES]) for count in (num_steps, num_steps + 5)]
    assert passes[1] - passes[0] == 5


def test_a_slice_that_is_not_aligned() -> None:
    n = 4500 if INTERPRETED else 1_000_003
    x, g = torch.randn(n + 3, generator=GENERATOR), torch.randn(n + 3, generator=GENERATOR)
    balance, addend, search = x.to(DEVICE, copy=True)[3:], g.to(DEVICE)[1:-2], new_search(n, 50, DEVICE)
    for _ in range(2):
        want = reference.withdraw_(x[3:], g[1:-2], 50, new_search(n, 50))
        got = gpu.withdraw_(balance, addend, 50, search)
        assert same(got[0], want[0]) and same(got[1], want[1]) and same(balance, x[3:])


def test_arguments_are_checked() -> None:
    x = torch.randn(100, device=DEVICE)
    search = new_search(100, 5, DEVICE)
    wrong: list[Callable[[], Any]] = [
        lambda: gpu.withdraw_(x.double(), None, 5, search),
        lambda: gpu.withdraw_(x, x[:50], 5, search),
        lambda: gpu.withdraw_(x[::2], None, 5, search),
        lambda: gpu.withdraw_(x, None, 101, search),
        lambda: gpu.withdraw_(x, None, 0, search),
        lambda: gpu.pack_lanes(torch.ones(3, dtype=torch.int32, device=DEVICE), 32),
        lambda: gpu.unpack_signs(torch.ones(3, dtype=torch.int32, device=DEVICE), 97, 1.0),
        lambda: gpu.set_bits(torch.ones(3, device=DEVICE), 97),
    ]
    for call in wrong:
        with pytest.raises(KernelError, match="give"):
            call()


@pytest.mark.skipif(not INTERPRETED, reason="on a device the programs run at once anyway")
@pytest.mark.parametrize("num_programs", (5,))
def test_programs_in_any_order(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"TILE": 128, "WORDS": 4, "SPAN": 64, "TURNS": 2, "_AT_HAND": 16}
    for module in (sparse, withdraw_stages):
        for name in small.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, tl.constexpr(small[name]))
    monkeypatch.setattr(sparse, "num_resident", lambda *_: num_programs)
    with programs_taking_turns():
        for name in ("normal", "ties", "large in one place", "nan and inf"):
            x = vectors(1700)[name]
            for k in (17, 240):
                noise = None if name == "ties" else torch.randn(1700, generator=GENERATOR) * 0.1
                steps_agree(x, k, [None, noise, noise])


@ON_CUDA
def test_large_buckets() -> None:
    n = 2**27
    for share, scale in ((0.01, 1.0), (0.001, 1e-40), (0.7, 1.0)):
        k = int(share * n)
        x = torch.randn(n, device=DEVICE) * scale
        x[: n // 40] *= 30  # a layer larger than the others
        balance, search = x.clone(), new_search(n, k, DEVICE)
        for step in range(3):
            g = torch.randn(n, device=DEVICE) * 0.05 * scale if step else None
            x = x + g if g is not None else x
            positions, values = gpu.withdraw_(balance, g, k, search)
            bits = x.view(torch.int32) & 0x7FFFFFFF
            kth = bits.kthvalue(n - k + 1).values
            want = (bits > kth).nonzero().squeeze(1)
            ties = (bits == kth).nonzero().squeeze(1)[: k - want.numel()]
            want = torch.cat([want, ties]).sort().values
            assert torch.equal(positions, want.to(torch.int32)) and torch.equal(values, x[want])
            x[want] = 0
            assert torch.equal(balance, x)


@ON_CUDA
def test_runs_are_bit_identical() -> None:
    n, k = 10_000_019, 100_000
    x, g = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)

    def run() -> list[Tensor]:
        balance, search = x.clone(), new_search(n, k, DEVICE)
        found = [gpu.withdraw_(balance, g, k, search) for _ in range(4)]
        return [balance, search, *(t for pair in found for t in pair)]

    first = run()
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))


@ON_CUDA
def test_a_graph_can_hold_it() -> None:
    n, k = 1_000_000, 10_000
    x, g = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)
    balance, search = x.clone(), new_search(n, k, DEVICE)
    gpu.withdraw_(balance.clone(), g, k, search)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        positions, values = gpu.withdraw_(balance, g, k, search)
    balance.copy_(x)
    want_balance, want_search = x.clone(), new_search(n, k, DEVICE)
    for _ in range(3):
        graph.replay()
        want = reference.withdraw_(want_balance, g, k, want_search)
        assert same(positions, want[0]) and same(values, want[1]) and same(balance, want_balance)


@pytest.mark.parametrize("n", LENGTHS)
def test_parts_of_the_search(n: int) -> None:
    thresholds = torch.tensor([0.0, 0.5, -1.0, torch.inf])
    for x in vectors(n).values():
        here = x.to(DEVICE)
        for below in (torch.inf, 2.0**64, 1.0, 2.0**140):
            assert gpu.all_finite(here, below) == reference.all_finite(x, below)
        assert same(gpu.count_at_least(here, thresholds.to(DEVICE)), reference.count_at_least(x, thresholds))
        torch.testing.assert_close(
            gpu.mean_magnitude(here).cpu(), reference.mean_magnitude(x), rtol=1e-12, atol=0, equal_nan=True
        )  # float64 sums in another order


@ON_CUDA
@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_takes_what_it_takes_on_a_host(name: str) -> None:
    for n in (1000, 50_000):
        for x in (torch.randn(n, generator=GENERATOR), torch.randn(n, generator=GENERATOR) ** 5):
            for k in (1, n // 100, n // 2, n):
                balance, here = x.clone(), x.to(DEVICE, copy=True)
                want = SEARCHES[name](balance, x, k, new_search(n, k))
                got = SEARCHES[name](here, x.to(DEVICE), k, new_search(n, k, DEVICE))
                assert same(got[0], want[0]) and same(got[1], want[1]) and same(here, balance)


@pytest.mark.parametrize("rank", (1, 3, 4, 16, 20))
def test_bases_are_the_reference_s(rank: int) -> None:
    expected, factors, places = thin_matrices(rank)
    bases = expected.to(DEVICE, copy=True)
    reference.orthonormal_(expected, factors, places, rank)
    gpu.orthonormal_(bases, factors.to(DEVICE), places.to(DEVICE), rank)
    torch.testing.assert_close(bases.cpu(), expected, rtol=0, atol=1e-6)  # the order of a sum may show


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("rank", (1, 3, 4, 20))
def test_products_with_thin_matrices_are_the_reference_s(rank: int, transposed: bool) -> None:
    """Of shapes that no block divides; what lies between the matrices, and between the factors, is let alone."""
    sizes = [(70, 300), (1, 5), (rank, 33)] if INTERPRETED else [(70, 300), (1, 5), (rank, 33), (768, 3072)]
    places, starts = [], [3, 0, 2]
    for rows, cols in sizes:
        long, short = (cols, rows) if transposed else (rows, cols)
        places.append([starts[0], rows, cols, starts[1], starts[2]])
        starts = [starts[0] + rows * cols + 1, starts[1] + short * rank, starts[2] + long * rank]
    matrices, bases, factors, mean = (torch.randn(n, generator=GENERATOR) for n in (*starts, starts[2]))
    table = torch.tensor(places)
    there = [each.to(DEVICE, copy=True) for each in (factors, matrices, bases, mean, table)]
    reference.thin_products_(factors, matrices, bases, table, rank, transposed=transposed)
    gpu.thin_products_(*there[:3], there[4], rank, transposed=transposed)
    torch.testing.assert_close(there[0].cpu(), factors, rtol=0, atol=1e-3)  # the order of a sum may show
    for dtype in (torch.float32, torch.bfloat16):
        out = matrices.to(dtype, copy=True)
        out_there = out.to(DEVICE, copy=True)
        here = (matrices, out, bases, factors, mean, table)
        given = (there[1], out_there, there[2], factors.to(DEVICE), there[3], there[4])
        reference.settle_products_(*here, rank, transposed=transposed, factor=0.5)
        gpu.settle_products_(*given, rank, transposed=transposed, factor=0.5)
        torch.testing.assert_close(there[1].cpu(), matrices, rtol=1e-5, atol=1e-2)  # of products of about 100
        torch.testing.assert_close(out_there.cpu(), out, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("n", LENGTHS)
def test_signs_and_votes(n: int) -> None:
    for x in vectors(n).values():
        words = gpu.pack_signs(x.to(DEVICE))
        assert same(words, reference.pack_signs(x))
        for scale in (0.3, 0.0):
            assert same(gpu.unpack_signs(words, n, scale), reference.unpack_signs(words.cpu(), n, scale))
    for num_voters in (1, 2, 3, 8, 9):
        ballots = [_words(n) for _ in range(num_voters)]
        for got, want in zip(gpu.vote([b.to(DEVICE) for b in ballots]), reference.vote(ballots), strict=True):
            assert same(got, want)


@pytest.mark.parametrize("n", LENGTHS)
def test_lanes_and_check_sums(n: int) -> None:
    for width in (1, 3, 8, 17, 31):
        values = torch.randint(2**width, (n,), generator=GENERATOR).to(torch.int32)
        words = gpu.pack_lanes(values.to(DEVICE), width)
        assert same(words, reference.pack_lanes(values, width))
        assert same(gpu.unpack_lanes(words, n, width), values)
        for some in (words, words[1:], torch.stack([words, _flipped(words)])[:, 1:]):
            assert same(gpu.check_sum(some), reference.check_sum(some.cpu()))


@pytest.mark.parametrize("n", [10, 11, 5000])
def test_frames_are_sealed_as_by_the_reference(n: int) -> None:
    words = _words(n)
    words[:2] = 0
    there = words.to(DEVICE, copy=True)
    for code, given in ((reference, words), (gpu, there)):
        code.seal_(given, [1, 2**31 - 1, 3, 4, 5, 6, 7])
    assert same(there, words)


@pytest.mark.parametrize("n", LENGTHS)
def test_codes_of_positions_and_sums(n: int) -> None:
    for k in sorted({0, 1, n // 7, n}):
        positions = torch.randperm(n, generator=GENERATOR)[:k].sort().values.to(torch.int32)
        here = positions.to(DEVICE)
        bitmap = gpu.set_bits(here, n)
        assert same(bitmap, reference.set_bits(positions, n)) and same(gpu.unpack_bits(bitmap), positions)
        assert same(gpu.set_bits(torch.cat([here.flip(0), here]), n), bitmap.cpu())
        for width in (0, 5):
            num_high_bits = k + (n >> width) + 1
            words = gpu.encode_elias_fano(here, width, num_high_bits)
            assert same(words, reference.encode_elias_fano(positions, width, num_high_bits))
            assert same(gpu.decode_elias_fano(words, n, k, width), positions)
            for damaged in (_flipped(words) for _ in range(2)):
                want = reference.decode_elias_fano(damaged.cpu(), n, k, width)
                assert same(gpu.decode_elias_fano(damaged, n, k, width), want)
        total, values = torch.randn(n, generator=GENERATOR), torch.randn(2, k, generator=GENERATOR)
        got = total.to(DEVICE, copy=True)
        gpu.add_at_(got, [here, here], list(values.to(DEVICE)))
        reference.add_at_(total, [positions, positions], list(values))
        assert same(got, total)


def _words(count: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (count,), generator=GENERATOR).to(torch.int32)


def _flipped(words: Tensor) -> Tensor:
    """The words with one bit changed."""
    bit = int(torch.randint(32 * words.numel(), (), generator=GENERATOR))
    mask = torch.zeros_like(words)
    mask[bit // 32] = (1 << bit % 32) - (2**32 if bit % 32 == 31 else 0)
    return words ^ mask


_here = threading.local()  # the turns that this thread's program takes part in, and its number


class _Turns:
    def __init__(self, count: int) -> None:
        self.waiting, self.now = list(range(count)), -1
        self.changed, self.random = threading.Condition(), random.Random(count)
        self.failures: list[BaseException] = []

    def draw(self) -> None:
        self.now = self.random.choice(self.waiting) if self.waiting else -1
        self.changed.notify_all()

    def pass_on(self, me: int) -> None:
        with self.changed:
            self.draw()
            self.changed.wait_for(lambda: self.now == me)
        interpreter.interpreter_builder.set_grid_idx(me, 0, 0)

    def run(self, me: int, program: Callable[[], None]) -> None:
        _here.turns, _here.me = self, me
        with self.changed:
            self.changed.wait_for(lambda: self.now == me)
        interpreter.interpreter_builder.set_grid_idx(me, 0, 0)
        try:
            program()
        except BaseException as error:
            self.failures.append(error)
        with self.changed:
            self.waiting.remove(me)
            self.draw()


def _run_all(fn: Callable[..., None], count: int, args: dict[str, Any]) -> None:
    turns = _Turns(count)
    threads = [threading.Thread(target=turns.run, args=(me, lambda: fn(**args))) for me in range(count)]
    for thread in threads:
        thread.start()
    with turns.changed:
        turns.draw()
    for thread in threads:
        thread.join()
    if turns.failures:
        raise turns.failures[0]


def _pausing(operation: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "turns", None) and (operation.__name__ != "create_load" or args[-1]):
            _here.turns.pass_on(_here.me)
        return operation(self, *args, **kwargs)

    return call


@contextmanager
def programs_taking_turns() -> Iterator[None]:
    """Launches within run their programs in turns."""
    builder, executor = type(interpreter.interpreter_builder), interpreter.GridExecutor
    atomic, load, launch = builder.create_atomic_rmw, builder.create_load, executor.__call__

    def launch_in_turns(self: Any, *args: Any, **kwargs: Any) -> None:
        fn, (count,), self.grid = self.fn, self.grid, (1,)

        def program(**args: Any) -> None:
            interpreter.interpreter_builder.set_grid_dim(count, 1, 1)
            _run_all(fn, count, args)

        program.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
        program.__annotations__ = fn.__annotations__
        program.original = fn  # type: ignore[attr-defined]
        self.fn = program
        launch(self, *args, **kwargs)

    builder.create_atomic_rmw, builder.create_load = _pausing(atomic), _pausing(load)
    executor.__call__ = launch_in_turns
    try:
        yield
    finally:
        builder.create_atomic_rmw, builder.create_load, executor.__call__ = atomic, load, launch


@pytest.mark.parametrize("take", [False, True])
def test_frames_are_summed_over_their_union(take: bool) -> None:
    for n, counts in ((1, [1, 0]), (5000, [40, 0, 300])):
        at = [torch.randperm(n, generator=GENERATOR)[:k].sort().values.to(torch.int32) for k in counts]
        values = [torch.randn(k, generator=GENERATOR) for k in counts]
        want_total = torch.randn(n, generator=GENERATOR)
        total = want_total.to(DEVICE, copy=True)
        want = reference.sum_over_union_(want_total, at, values, take=take)
        frames = [one.to(DEVICE) for one in at], [one.to(DEVICE) for one in values]
        assert all(map(same, gpu.sum_over_union_(total, *frames, take=take), want)) and same(total, want_total)
