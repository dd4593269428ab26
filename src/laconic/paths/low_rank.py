"""Low rank: the network adds thin factors of the workers' matrices, whose product is the mean of what they sent."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels import hash_64
from laconic.layout import Layout, Span, positions_of
from laconic.memory import Ledger
from laconic.paths.path import Message, Messages, Path, Work
from laconic.quantize import FloatCode
from laconic.select import LowRank
from laconic.transport import ring_bytes

LEFT, RIGHT = range(2)  # P, which has a row for each row of M, and Q, which has one for each column


@dataclass(frozen=True)
class _Round:
    """One message: the factors of a side, and in a bucket's first what goes whole; float32."""

    side: int
    own: Tensor  # as this worker sent it
    mean: Tensor  # over all workers


@dataclass
class LowRankSum(Path):
    """P = mean_i(M_i Q) ; P made orthonormal ; Q_i = M_i^T P ; M' = P mean_i(Q_i)^T ; M_i -= P Q_i^T.

    M_i is a worker's balance, the gradient included. What it sent is P Q_i^T, as its codes say it, and the mean of that
    is what all apply, so nothing is lost on any worker: balance before + gradient = sent + balance after. (PowerSGD
    keeps M_i - M' instead: of the same sum over workers, but their differences add up in it, and an idle worker's share
    would be lost.) How P was rounded does not matter: it is a basis, the same bits on all workers.
    A received factor is the basis of its side from then on. The alternating form sends one factor a step, by the basis
    of the other side. What goes whole rides in the first message.
    """

    select: LowRank
    quantize: FloatCode

    def __post_init__(self) -> None:
        self._ledger = Ledger(("bases",), _Bases)
        self._factors: dict[Layout, _Factors] = {}

    @property
    def message_offsets(self) -> Sequence[int]:
        return (0, 1) if self.select.form == "both" else (0,)  # P and Q, or one of them

    def bytes_out(self, layout: Layout) -> int:
        """In the alternating form the mean of two steps."""
        factors = _Factors(self.select, layout, torch.device("cpu"))
        left, right = factors.counts
        if self.select.form == "both":
            return self._ring(left + factors.plan.num_fixed) + self._ring(right)
        return sum(self._ring(count + factors.plan.num_fixed) for count in (left, right)) // 2

    def _ring(self, count: int) -> int:
        return ring_bytes(self.quantize.num_bytes(count), self.transport.num_workers)

    def kept(self, work: Work) -> Sequence[Tensor]:
        return self._bases_of(work).kept

    def exchange(self, work: Work) -> Messages:
        factors = self._factors_of(work)
        if work.finite:
            work.account.deposit_(work.flat, 1 / work.scale)
        rounds: list[_Round] = []
        for side in [LEFT, RIGHT] if self.select.form == "both" else [work.step % 2]:
            if rounds and not factors.matrices:
                break
            received = yield from self._multiply(work, side, with_whole=not rounds)
            if received is None:
                return None
            rounds.append(received)
        return rounds[0], rounds[-1]

    def _multiply(self, work: Work, side: int, *, with_whole: bool) -> Generator[Message, Any, _Round | None]:
        """The factors of a side, by the bases of the other, and new bases; None if some worker's are not finite."""
        factors = self._factors_of(work)
        bases = self._bases_of(work)
        balance = work.account.balance
        num_workers = self.transport.num_workers
        num_factors = factors.counts[side]
        with self.clock.time("encode", work.device):
            own = balance.new_full((num_factors + factors.plan.num_fixed * with_whole,), torch.nan)
            if work.finite:
                kernels.thin_products_(
                    *(own[:num_factors], balance, bases.kept[0], factors.places[side], self.select.rank),
                    transposed=side == RIGHT,
                )
                if with_whole:
                    torch.index_select(balance, 0, factors.positions, out=own[num_factors:])
            codes = own.div(num_workers).to(self.quantize.sum_dtype(work.flat.dtype))
            if codes.dtype != torch.float32:
                own = codes.to(torch.float32).mul_(num_workers)
            codes = self.on_wire(codes)
        yield partial(self.transport.all_reduce_, codes, "factors")
        with self.clock.time("decode", work.device):
            if not kernels.all_finite(codes):  # where they lie, which a GPU need not be waited for
                return None
            mean = codes.to(work.device, torch.float32, non_blocking=True)
            factors.renew_(bases, mean, side)
            return _Round(side, own, mean)

    def apply_(self, work: Work, received: tuple[_Round, _Round]) -> None:
        """Overwrite the bucket with M', and take what was sent out of the balance."""
        factors = self._factors_of(work)
        first, last = received
        balance = work.account.balance
        positions = factors.positions
        whole = slice(factors.counts[first.side], None)
        balance.index_add_(0, positions, first.own[whole], alpha=-1)
        work.flat.index_copy_(0, positions, (first.mean[whole] * work.scale).to(work.flat.dtype))
        count = factors.counts[last.side]
        kernels.settle_products_(
            *(balance, work.flat, self._bases_of(work).kept[0], last.own[:count], last.mean[:count]),
            *(factors.places[last.side], self.select.rank),
            transposed=last.side == RIGHT,
            factor=work.scale,
        )

    def _factors_of(self, work: Work) -> "_Factors":
        if work.layout not in self._factors:
            self._factors[work.layout] = _Factors(self.select, work.layout, work.device)
        return self._factors[work.layout]

    def _bases_of(self, work: Work) -> "_Bases":
        factors = self._factors_of(work)
        bases = self._ledger.open(factors.kept_layout, work.device)
        if not bases.are_drawn:
            factors.draw_(bases)
        return bases

    def state_dict(self) -> dict[str, Any]:
        return {"past": self._ledger.state_dict()}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._ledger.load_state_dict(dict(states[0]["past"]))  # the same on all workers


class _Bases:
    """The kept bases of one bucket: for each matrix the orthonormal P of its last round above the orthonormal Q."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        self.kept = kept
        self.are_drawn = False  # not so when a parameter is new here, whose basis is zero


class _Factors:
    """What a bucket of one layout sends: the factors of its matrices one after another, then what goes whole."""

    def __init__(self, select: LowRank, layout: Layout, device: torch.device) -> None:
        self._select = select
        self.matrices = [span for span in layout.spans if select.is_factored(span)]
        self.plan = select.plan(layout, select.density)
        self.positions = positions_of(self.plan.fixed, device)  # of what goes whole
        sizes = [(span.shape[0], span.num_entries // span.shape[0]) for span in self.matrices]
        self.kept_layout = Layout.of([span.name for span in self.matrices], [select.rank * sum(size) for size in sizes])
        starts, kept = (_starts(spans) for spans in (self.matrices, self.kept_layout.spans))
        self._rows = torch.tensor(sizes, dtype=torch.int64).view(-1, 2).unbind(1)  # of each factor of a side
        lengths = [select.rank * rows for rows in self._rows]
        in_message = [length.cumsum(0) - length for length in lengths]  # where each factor of a side starts there
        self._kept_starts = [kept, kept + lengths[LEFT]]
        self.counts = [int(length.sum()) for length in lengths]  # the numbers in all factors of a side
        # For each side: (start, rows, columns, start of the other side's basis, start of its factor) of each matrix,
        self.places = [
            torch.stack([starts, *self._rows, self._kept_starts[1 - side], in_message[side]], 1).to(device)
            for side in (LEFT, RIGHT)
        ]
        # and (start of its basis, start of its factor, rows).
        self._kept_places = [
            torch.stack([self._kept_starts[side], in_message[side], self._rows[side]], 1).to(device)
            for side in (LEFT, RIGHT)
        ]

    def renew_(self, bases: _Bases, message: Tensor, side: int) -> None:
        """Overwrite the bases of one side with what spans the same as the factors in a message."""
        kernels.orthonormal_(bases.kept[0], message, self._kept_places[side], self._select.rank)

    def draw_(self, bases: _Bases) -> None:
        """Give the parameters that have none first bases, drawn from (seed, name): the same on every worker."""
        kept = bases.kept[0]
        is_fresh = []
        for span in self.kept_layout.spans:
            fresh = kept[span.start : span.stop]
            is_fresh.append(not fresh.any())
            if is_fresh[-1]:
                key = hash_64(self._select.seed, crc32(span.name.encode()))
                # Whole numbers, of a generator whose raw output is the same everywhere, brought into (-1, 1).
                drawn = np.random.Philox(key=key).random_raw(fresh.numel()) >> np.uint64(40)
                fresh.copy_(torch.from_numpy((drawn + 0.5) / 2.0**23 - 1))
        for starts, rows in zip(self._kept_starts, self._rows, strict=True):
            places = torch.stack([starts, starts, rows], 1)[torch.tensor(is_fresh, dtype=torch.bool)]
            kernels.orthonormal_(kept, kept, places.to(kept.device), self._select.rank)
        bases.are_drawn = True


def _starts(spans: Sequence[Span]) -> Tensor:
    return torch.tensor([span.start for span in spans], dtype=torch.int64)
