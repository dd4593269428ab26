"""Low rank: the network adds thin factors of the workers' matrices, whose product is the mean of what they sent."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.layout import Layout
from laconic.memory import Ledger
from laconic.paths.factors import LEFT, RIGHT, Bases, BasesKeeper, Factors
from laconic.paths.path import Message, Path, Said, Speech, Work
from laconic.quantize import FloatCode
from laconic.select import LowRank
from laconic.transport import ring_bytes


@dataclass(frozen=True)
class _Round:
    """One message: the factors of a side, and in a bucket's first what goes whole; float32."""

    side: int
    own: Tensor  # as this worker said it
    mean: Tensor  # over all workers


@dataclass
class LowRankSum(Path):
    """P = mean_i(M_i Q) ; P made orthonormal ; Q_i = M_i^T P ; M' = P mean_i(Q_i)^T ; M_i -= P Q_i^T.

    M_i is a worker's balance, the gradient included. What it sent is P Q_i^T, as its codes say it, and the mean of that
    is what all apply, so nothing is lost on any worker: balance before + gradient = sent + balance after. (PowerSGD
    keeps M_i - M' instead: of the same sum over workers, but their differences add up in it, and an idle worker's share
    would be lost.) How P was rounded does not matter: it is a basis, the same bits on all workers.
    A factor that was heard is the basis of its side from then on. The alternating form sends one factor a step, by the
    basis of the other side. What goes whole rides in the first message.
    """

    select: LowRank
    quantize: FloatCode

    def __post_init__(self) -> None:
        self._ledger = Ledger(BasesKeeper())
        self._factors: dict[Layout, Factors] = {}

    @property
    def turns(self) -> Sequence[int]:
        """P and Q, or one of them."""
        return (0, 1) if self.select.form == "both" else (0,)

    def bytes_out(self, layout: Layout) -> int:
        """In the alternating form the mean of two steps."""
        factors = Factors(self.select, layout)
        counts = [factors.count(LEFT), factors.count(RIGHT)]
        if self.select.form == "both":
            return self._ring(counts[LEFT] + factors.plan.num_fixed) + self._ring(counts[RIGHT])
        return sum(self._ring(count + factors.plan.num_fixed) for count in counts) // 2

    def _ring(self, count: int) -> int:
        return ring_bytes(self.quantize.num_bytes(count), self.transport.num_workers)

    def kept(self, work: Work) -> Sequence[Tensor]:
        return self._bases_of(work).kept

    def speak(self, work: Work) -> Speech:
        factors = self._factors_of(work)
        if work.finite:
            work.account.deposit_(work.flat, 1 / work.scale)
        rounds: list[_Round] = []
        for side in [LEFT, RIGHT] if self.select.form == "both" else [work.step % 2]:
            if rounds and not factors.matrices:
                break
            heard = yield from self._multiply(work, side, with_whole=not rounds)
            if heard is None:
                return None
            rounds.append(heard)
        return Said((rounds[0], rounds[-1]))

    def _multiply(self, work: Work, side: int, *, with_whole: bool) -> Generator[Message, Any, _Round | None]:
        """The factors of a side, by the bases of the other, and new bases; None if some worker's are not finite."""
        factors = self._factors_of(work)
        bases = self._bases_of(work)
        balance = work.account.balance
        num_workers = self.transport.num_workers
        num_factors = factors.count(side)
        with self.clock.time("encode", work.device):
            own = balance.new_full((num_factors + factors.plan.num_fixed * with_whole,), torch.nan)
            if work.finite:
                kernels.thin_products_(
                    *(own[:num_factors], balance, bases.kept[0], factors.places(side, work.device), self.select.rank),
                    transposed=side == RIGHT,
                )
                if with_whole:
                    torch.index_select(balance, 0, factors.positions(work.device), out=own[num_factors:])
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

    def apply_(self, work: Work, said: Said) -> None:
        """Overwrite the bucket with M', and take what was sent out of the balance."""
        factors = self._factors_of(work)
        first, last = said.heard
        balance = work.account.balance
        positions = factors.positions(work.device)
        whole = slice(factors.count(first.side), None)
        balance.index_add_(0, positions, first.own[whole], alpha=-1)
        work.flat.index_copy_(0, positions, (first.mean[whole] * work.scale).to(work.flat.dtype))
        count = factors.count(last.side)
        kernels.settle_products_(
            *(balance, work.flat, self._bases_of(work).kept[0], last.own[:count], last.mean[:count]),
            *(factors.places(last.side, work.device), self.select.rank),
            transposed=last.side == RIGHT,
            factor=work.scale,
        )

    def _factors_of(self, work: Work) -> Factors:
        if work.layout not in self._factors:
            self._factors[work.layout] = Factors(self.select, work.layout)
        return self._factors[work.layout]

    def _bases_of(self, work: Work) -> Bases:
        factors = self._factors_of(work)
        bases = self._ledger.open(factors.kept_layout, work.device)
        if not bases.are_drawn:
            factors.draw_(bases)
        return bases

    def state_dict(self) -> dict[str, Any]:
        return {"past": self._ledger.state_dict()}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._ledger.load_state_dict(dict(states[0]["past"]))  # the same on all workers
