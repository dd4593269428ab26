"""The half of a session in which the network adds: floats in one type, or integers on a shared grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.layout import Bucket, Layout, positions_of
from laconic.memory import Account, Ledger
from laconic.quantize import Grid
from laconic.scheme import Scheme
from laconic.select import Plan, RandK
from laconic.session.integers import IntegerSum
from laconic.session.stats import PhaseClock
from laconic.transport import Transport


class Kept(Protocol):
    """What has tensors that outlive a step."""

    kept: Sequence[Tensor]


@dataclass(frozen=True)
class _Sent:
    """The entries of a bucket that all workers send at a step."""

    positions: Tensor | None  # None: every entry
    num_fixed: int  # how many of them go at every step; they come first
    gain: float  # of the others, so that the mean stays true where nothing is kept

    def note_(self, account: Account, values: Tensor) -> None:
        """Tell the account which of the entries that wait for their turn have gone out."""
        if self.positions is not None:
            account.sent_(self.positions[self.num_fixed :], values[self.num_fixed :])


class Summing:
    """What a session needs to let the network add; Session sets it up and counts the steps."""

    scheme: Scheme
    transport: Transport
    _ledger: Ledger[Account]
    _clock: PhaseClock
    _loss_scale: Callable[[], float] | None
    _holds_idle: bool
    _step: int
    _scale: float
    _overflowed: bool
    _undo: list[tuple[Kept, list[Tensor]]]
    _seen: list[Layout]
    _integers: IntegerSum | None  # where codes lie on a grid
    _shared_plans: dict[tuple[Layout, float], tuple[Plan, Tensor]]

    def _reduce_(self, bucket: Bucket, density: float) -> None:
        """Round what all workers send and let the network add."""
        flat, device, num_workers = bucket.flat, bucket.flat.device, self.transport.num_workers
        dense_step = density >= 1 > self.scheme.select.density
        if self._integers is not None and not dense_step:
            self._reduce_integers_(bucket, self._sent(bucket, density), self._integers)
        elif self.scheme.memory.kinds or density < 1:
            self._reduce_account_(bucket, self._sent(bucket, density))
        else:
            with self._clock.time("encode", device):
                # Multiplied first, as DDP does, so that the sum stays within the range of a 16-bit type.
                codes = flat.mul_(1 / num_workers).to(self._sum_dtype(flat))
            with self._clock.time("exchange", device):
                self.transport.all_reduce_(codes, "dense")
            with self._clock.time("decode", device):
                flat.copy_(codes)  # Inf and NaN survive a sum, so all workers see them alike

    def _reduce_account_(self, bucket: Bucket, sent: _Sent) -> None:
        """Deposit, withdraw what is sent, round, and let the network add."""
        flat, device, num_workers = bucket.flat, bucket.flat.device, self.transport.num_workers
        account = self._ledger.open(bucket.layout, device)
        before = self._undo_later(account)
        with self._clock.time("select", device):
            finite = kernels.all_finite(flat)
            values = self._withdraw(account, bucket, sent, finite)
        with self._clock.time("encode", device):
            values = values.div_(num_workers)
            codes = values.to(self._sum_dtype(flat))
            if finite and codes.dtype != torch.float32 and self.scheme.memory.refunds:
                account.refund_(sent.positions, (values - codes.to(torch.float32)).mul_(num_workers))
        with self._clock.time("exchange", device):
            self.transport.all_reduce_(codes, "dense")
        with self._clock.time("decode", device):
            if kernels.all_finite(codes):
                sent.note_(account, codes)
                _write_(flat, sent, codes if self._scale == 1 else codes * self._scale)
            else:
                self._overflowed = True
                restore_(account, before)
                flat.fill_(torch.nan)

    def _reduce_integers_(self, bucket: Bucket, sent: _Sent, integers: IntegerSum) -> None:
        """Deposit, withdraw what is sent, agree on a grid, round onto it, and let the network add the codes."""
        flat, device, frame_id = bucket.flat, bucket.flat.device, (self._step, len(self._seen) - 1)
        account = self._ledger.open(bucket.layout, device)
        if self._loss_scale is not None:
            self._undo_later(account)
        with self._clock.time("select", device):
            finite = kernels.all_finite(flat)
            values = self._withdraw(account, bucket, sent, finite)
        steps = integers.agree(values, finite=finite)
        if steps is None:
            self._overflowed = True
            if finite:
                account.refund_(sent.positions, values)  # nobody will apply it
            flat.fill_(torch.nan)
            return
        with self._clock.time("encode", device):
            words = integers.encode(values, steps, *frame_id)
            if self.scheme.memory.refunds:
                said = integers.read_own(words, values.numel(), steps)
                account.refund_(sent.positions, values - said)
                sent.note_(account, said)
        with self._clock.time("exchange", device):
            words = integers.add(words, *frame_id)
        with self._clock.time("decode", device):
            mean = integers.read_mean(words, values.numel(), steps)
            _write_(flat, sent, mean if self._scale == 1 else mean.mul_(self._scale))

    def _sent(self, bucket: Bucket, density: float) -> _Sent:
        """Everything, or this step's draw of a selector that draws alike on all workers."""
        select, key = self.scheme.select, (bucket.layout, density)
        if density >= 1 or not isinstance(select, RandK):
            return _Sent(None, bucket.layout.num_entries, 1.0)
        if key not in self._shared_plans:
            plan = select.plan(*key)
            self._shared_plans[key] = plan, positions_of(plan.fixed, bucket.flat.device)
        plan, fixed = self._shared_plans[key]
        drawn = select.positions(plan, self._step, len(self._seen) - 1, fixed.device)
        kept = bool(self.scheme.memory.kinds)
        gain = 1.0 if kept or not plan.k else (plan.num_entries - plan.num_fixed) / plan.k
        return _Sent(torch.cat([fixed, drawn]), plan.num_fixed, gain)

    def _withdraw(self, account: Account, bucket: Bucket, sent: _Sent, finite: bool) -> Tensor:
        """Deposit the gradient and take out what is sent; NaN for all of it, and no deposit, if it is not finite."""
        if not finite:
            count = bucket.flat.numel() if sent.positions is None else sent.positions.numel()
            return torch.full((count,), torch.nan, dtype=torch.float32, device=bucket.flat.device)
        with self._held(account, bucket):
            account.deposit_(bucket.flat, 1 / self._scale)
            return account.withdraw_(sent.positions)

    def _sum_dtype(self, flat: Tensor) -> torch.dtype:
        """The type the network adds in; a dense step of another scheme keeps the gradient's own.

        What a 16-bit sum rounds away in flight is nobody's to keep.
        """
        quantize = self.scheme.quantize
        floats = self.scheme.exchange.adds_in_flight and not isinstance(quantize, Grid)
        return quantize.sum_dtype(flat.dtype) if floats else flat.dtype  # type: ignore[union-attr]

    def _undo_later(self, account: Kept) -> list[Tensor]:
        """Remember the account as it is, for the end of a step that is skipped.

        A GradScaler skips the whole step when any bucket overflows, also one still to come. This costs a copy of the
        balance, so only those who have a GradScaler pay for it, and dense steps, whose exchange dwarfs it.
        """
        before = [tensor.clone() for tensor in account.kept]
        if self._loss_scale is not None:
            self._undo.append((account, before))
        return before

    @contextmanager
    def _held(self, account: Account, bucket: Bucket) -> Iterator[None]:
        """Keep what is kept of idle parameters out of the account meanwhile, and put it back untouched."""
        spans = bucket.layout.spans if self._holds_idle else ()
        idle = [slice(span.start, span.stop) for span in spans if not bucket.flat[span.start : span.stop].any()]
        with set_aside([tensor[span] for tensor in account.kept for span in idle]):
            yield


def _write_(flat: Tensor, sent: _Sent, mean: Tensor) -> None:
    """Overwrite `flat` with the mean where something was sent, and with zeros elsewhere."""
    if sent.positions is None:
        flat.copy_(mean)
        return
    mean[sent.num_fixed :].mul_(sent.gain)
    flat.zero_()
    flat[sent.positions] = mean.to(flat.dtype)


@contextmanager
def set_aside(views: Sequence[Tensor]) -> Iterator[None]:
    """Zeros in these views meanwhile; then what was there."""
    before = [view.clone() for view in views]
    for view in views:
        view.zero_()
    yield
    for view, kept in zip(views, before, strict=True):
        view.copy_(kept)


def restore_(account: Kept, before: Sequence[Tensor]) -> None:
    """Make the account what it was."""
    for tensor, saved in zip(account.kept, before, strict=True):
        tensor.copy_(saved)
