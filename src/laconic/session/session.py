"""One worker's running scheme: one step, one body, whatever path the buckets take."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import LaconicError, SchemeError, StateError
from laconic.fault_points import armed, fault_point
from laconic.kernels import Executor
from laconic.layout import Bucket, Layout
from laconic.memory import Account, Ledger, Nothing, SetAside, Undo
from laconic.paths import PHASES, Exchange, Path, PhaseClock, Work, dense_path, path_for
from laconic.scheme import Scheme
from laconic.session import state
from laconic.session.stats import Stats, metrics_of, step_ends
from laconic.transport import Transport, ring_bytes, rows_of

_log = logging.getLogger("laconic.session")

# The least |g| that counts as Inf, in unscaled units. A balance is float32: it would hold 2^64 of these, so neither
# steps that an entry waits nor momentum nor the states of other workers bring it to Inf, where it would stay.
TOO_LARGE = 2.0**64
_MOST_IN_A_ROW = 10  # steps; a model that does not recover in so many does not recover


class Session:
    """Exchanges buckets under a scheme over a transport; every worker passes the same buckets in the same order.

    `loss_scale` tells the current scale of a GradScaler: balances are kept in unscaled units, and a step in which some
    worker saw Inf or NaN is undone bit for bit, as it is with `undoes`. `holds_idle` leaves the account of a parameter
    untouched in a step that gave it no gradient, since DDP drops what it receives for a parameter that no worker used.
    `zeroes` makes a bucket zero, not NaN, in which some worker saw Inf or NaN, and ten such steps in a row an error.
    `discards` copies to the host, before each step, everything that outlives one, so that discard_() can take the step
    back.
    `warns` lets the first worker advise where steps in a row are not finite, as one of several sessions may for all.
    `executor` runs what a path computes: by default it captures CUDA graphs where it can.
    """

    def __init__(
        self,
        scheme: Scheme,
        transport: Transport,
        *,
        loss_scale: Callable[[], float] | None = None,
        holds_idle: bool = False,
        undoes: bool = False,
        zeroes: bool = False,
        discards: bool = False,
        warns: bool = True,
        executor: Executor | None = None,
    ) -> None:
        discards = discards and bool(scheme.memory.kinds)  # without memory nothing that is thrown away comes back
        if discards and transport.has_servers:
            raise SchemeError("servers cannot take a step back; leave unused_steps out, or servers")
        self.scheme = scheme
        self.transport = transport
        self._loss_scale = loss_scale
        self._holds_idle = holds_idle
        self._clock = PhaseClock()
        self._ledger: Ledger[Account] = scheme.memory.ledger()
        self._is_asked = not undoes  # whether a last step was finite; outer steps check for themselves
        undoes = undoes or loss_scale is not None
        self._path = path_for(
            *(scheme, transport, self._clock, self._ledger), executor=executor, undoes=undoes, holds_idle=holds_idle
        )
        self._dense = dense_path(scheme, transport, self._clock, keeps=bool(scheme.memory.kinds))  # of a warm-up
        self._plain = dense_path(scheme, transport, self._clock, keeps=False)
        self._overflow = OverflowRule(
            undoes=undoes, zeroes=zeroes, warns=warns and transport.rank == 0, keeps=bool(scheme.memory.kinds)
        )
        self._kernels = ""  # those of the gradients' device, once there are any
        self._step = 0
        self._first_step = 0  # as of Stats
        self._scale = 1.0
        self._target = scheme.select.density_among(transport.num_workers)  # share of entries that it aims to send
        self._dense_bytes_out = 0
        self._step_ends = step_ends()
        self._layouts: list[Layout] = []  # of the last whole step
        self._seen: list[Layout] = []  # of this one, as far as its buckets have come
        self._is_whole = False  # whether all of them have
        self._num_ended = 0
        self._last_overflowed = False
        self._last_unchecked: list[Tensor] = []  # what the last step made of buckets that nobody checked
        self._unchecked: list[Tensor] = []
        self._resumed_layouts: list[Layout] = []
        self._discards = discards
        self._before: dict[str, Any] | None = None  # the last step: what discard_() goes back to

    def exchange_(self, bucket: Bucket) -> None:
        """Overwrite bucket.flat with the mean over workers of what the scheme sends."""
        exchange = self.begin(bucket)
        while exchange.message is not None:
            received = self.send(exchange)
            try:
                exchange.resume(received)
            except BaseException:
                self.transport.shut_down()  # others may wait for what this worker would have sent next
                raise
        self.end_(exchange)

    def begin(self, bucket: Bucket) -> Exchange:
        """Select and encode, as far as the first message."""
        if armed:
            fault_point("bucket.begin", bucket)
        work = self._open(bucket)
        path = self._path_of(work)
        if path.checks_finite:
            self._check_(work, path)
        exchange = Exchange(work, path, path.exchange(work))
        exchange.resume()
        if armed:
            fault_point("bucket.encoded", bucket)
        return exchange

    def send(self, exchange: Exchange) -> Any:
        """Send its next message, and return what was received."""
        assert exchange.message is not None
        if armed:
            fault_point("bucket.send", exchange.work.bucket)
        with self._clock.time("exchange", self.transport.wire or exchange.work.device):
            received = exchange.message()
        exchange.was_late = self.transport.was_late
        return received

    def end_(self, exchange: Exchange) -> None:
        """Apply what was received; with the last bucket of a step the step ends."""
        if armed:
            fault_point("bucket.apply", exchange.work.bucket)
        exchange.work.bucket.was_late = exchange.was_late and exchange.received is not None
        self._close_(exchange.work, exchange.path, exchange.received)
        self._num_ended += 1
        if self._is_whole and self._num_ended == len(self._seen):
            self._end_step()
        if armed:
            fault_point("bucket.applied", exchange.work.bucket)

    def _open(self, bucket: Bucket) -> Work:
        """When, how much of it, and the account that it goes through."""
        if not self._seen and self._discards:
            self.discard_if_(bucket.follows_unused)
            self._before = self.state_dict()
        if not self._seen:
            self._kernels = kernels.backend(bucket.flat.device)
            # Where nothing is kept the scale stays on: a 16-bit type needs it.
            self._scale = self._loss_scale() if self._loss_scale and self.scheme.memory.kinds else 1.0
        self._seen.append(bucket.layout)
        self._is_whole = bucket.is_last
        self._dense_bytes_out += ring_bytes(4 * bucket.layout.num_entries, self.transport.num_workers)
        density = self.scheme.trigger.density(self._step - self._overflow.skipped_steps, self._target)
        account = Nothing().open([]) if bucket.is_plain else self._ledger.open(bucket.layout, bucket.flat.device)
        number = len(self._seen) - 1
        return Work(bucket, self._step, number, density, self._scale, account, TOO_LARGE * self._scale)

    def _path_of(self, work: Work) -> Path:
        """The scheme's, or that of a dense step where the scheme's own is sparse."""
        if work.bucket.is_plain:
            return self._plain
        return self._dense if work.density >= 1 > self._target else self._path

    def _check_(self, work: Work, path: Path) -> None:
        """Check that the gradient is finite, note what is kept for an undo, set that of idle parameters aside."""
        self._overflow.remember([*work.account.kept, *path.kept(work)])
        captures = path.captures(work)  # and then checks by itself
        if captures and not self._holds_idle:
            return
        with self._clock.time("select", work.device):
            work.finite = captures or kernels.all_finite(work.flat, work.too_large)
            if self._holds_idle:
                places = [slice(span.start, span.stop) for span in work.layout.spans]
                idle = [place for place in places if not work.flat[place].any()]
                work.aside = SetAside([tensor[place] for tensor in work.account.kept for place in idle])

    def _close_(self, work: Work, path: Path, received: Any) -> None:
        """Refund what rounding lost and apply what was received; or, where someone was not finite, neither.

        Of what was sent too late everything is refunded.
        """
        with self._clock.time("decode", work.device):
            if received is None:
                self._overflow.overflow_(work)
            else:
                if work.bucket.was_late:
                    self._overflow.undo_(work)
                path.finish_(work, received, refunds=self.scheme.memory.refunds)
                if not path.checks_finite:
                    self._check_sum_(work)
            if work.aside is not None:
                work.aside.restore_()

    def _check_sum_(self, work: Work) -> None:
        """Inf and NaN survive a plain sum: found now where they are to be zeros, or when someone asks."""
        if not self._overflow.zeroes:
            self._unchecked += [work.flat] if self._is_asked else []
        elif not kernels.all_finite(work.flat):
            self._overflow.overflow_(work)

    @property
    def last_step_finite(self) -> bool:
        """Return whether no worker gave the last step Inf or NaN; to be asked while the gradients are still there."""
        return not self._last_overflowed and all(map(kernels.all_finite, self._last_unchecked))

    @property
    def finite_so_far(self) -> bool:
        """Return whether no worker gave Inf or NaN to the step that is under way."""
        return not self._overflow.overflowed and all(map(kernels.all_finite, self._unchecked))

    def end_step_(self, *, finite: bool) -> None:
        """End a step none of whose buckets is marked as the last; it overflowed where others say so."""
        self._overflow.overflowed |= not finite
        self._unchecked = []
        self._end_step()

    def _end_step(self) -> None:
        self._last_overflowed = self._overflow.end_step_()
        if self._last_overflowed:
            self._path.restored()
        self._last_unchecked = self._unchecked
        self._unchecked = []
        self._step += 1
        self._layouts = self._seen
        self._seen = []
        self._is_whole = False
        self._num_ended = 0
        self._step_ends.append(self.totals())

    def discard_if_(self, unused: bool) -> None:
        """Take the last step back where its gradients were not used; a call that all workers make, and agree on."""
        answers = [bool(row[-1]) for row in rows_of(self.transport, [float(unused)])]
        if len(set(answers)) > 1:
            ranks = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer)
            raise LaconicError(f"rank {ranks} did not use its gradients, and others did; let all ranks do the same")
        if unused:
            if self._before is None:
                raise StateError("there is no step to discard; attach(..., unused_steps='discard') can take one back")
            self.load_state_dict(self._before)
            self._resumed_layouts = []  # buckets are cut as they were
            self._before = None

    @property
    def wants_whole_step(self) -> bool:
        """Return whether the next step must come in one piece, to `exchange_step_`."""
        return bool(self._resumed_layouts)

    def exchange_step_(self, buckets: Sequence[Bucket]) -> None:
        """Overwrite all buckets of one step with the mean over workers.

        The first step after a resume runs on the buckets of the step before the save, since DDP has only its first
        guess at them yet; selection per bucket, and the order in which an all-reduce adds, depend on the cut.
        """
        with state.regrouped(buckets, self._resumed_layouts) as cut:
            self._resumed_layouts = []
            for bucket in cut:
                self.exchange_(bucket)

    def stats(self, *, ages: bool = False) -> Stats:
        """Bytes out and in, by kind; seconds by phase; the ratio to dense.

        With `ages` also how long entries wait, where a score decides: a pass over all of them.
        """
        traffic = self.transport.traffic
        return Stats(
            scheme=str(self.scheme),
            kernels=self._kernels,
            num_workers=self.transport.num_workers,
            steps=self._step,
            first_step=self._first_step,
            skipped_steps=self._overflow.skipped_steps,
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            dense_bytes_out=self._dense_bytes_out,
            by_kind=traffic.copy(),
            seconds=dict(self._clock.seconds),
            **self._path.figures(ages=ages),
        )

    def metrics(self, **others: float) -> dict[str, float]:
        """The numbers of the last step, without a pass over anything; see `Attached.metrics`."""
        skipped = float(self._last_overflowed)
        return metrics_of(
            self._step_ends, step=self._step, skipped=skipped, members=self.transport.num_living, **others
        )

    def totals(self) -> dict[str, float]:
        """The counts so far, for metrics: numbers that the host has, so that nothing waits for a device."""
        traffic = self.transport.traffic
        return {
            "bytes_out": traffic.bytes_out,
            "bytes_in": traffic.bytes_in,
            "dense_bytes_out": self._dense_bytes_out,
            "pushed": self._path.num_pushed,
            "answered": self._path.num_answered,
            **{f"{phase}_ms": 1e3 * self._clock.seconds[phase] for phase in PHASES},
        }

    def residual_norm(self) -> float:
        """The norm of what this worker keeps, in unscaled units: a pass over all of it, which waits for the device."""
        owed = [account.balance for account in self._ledger.opened.values() if account.kept]
        return float(torch.stack([balance.norm() for balance in owed]).norm()) if owed else 0.0

    def count_on_from(self, before: "Session") -> None:
        """Add what another session counted that exchanged these gradients until now, over the same transport."""
        self._dense_bytes_out += before._dense_bytes_out
        for phase, seconds in before._clock.seconds.items():
            self._clock.seconds[phase] += seconds
        self._first_step -= before._step - before._first_step
        self._step_ends.append(self.totals())

    def state_dict(self) -> dict[str, Any]:
        """This worker's state as plain tensors and numbers, keyed by parameter name; save one per rank.

        Under dedicated servers a call that all workers make, and one gets what those keep.
        """
        kept = self._path.state_dict()  # under servers this also tells who is there
        progress = state.Progress(self._step, self._overflow.skipped_steps, self._layouts)
        return state.save(self.scheme, self.transport, progress, self._ledger.state_dict()) | kept

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's state, or from a list of all ranks' states when their number has changed."""
        states = state.by_rank(saved)
        progress, kept = state.load(states, self.scheme, self.transport)
        self._path.load_state_dict(states)
        self._first_step += progress.step - self._step  # what was counted before stays counted
        self._step = progress.step
        self._overflow.skipped_steps = progress.skipped_steps
        self._resumed_layouts = progress.layouts
        self._ledger.load_state_dict(kept)


class OverflowRule:
    """The one rule for a gradient that is Inf, NaN or as good as that, on some worker, whatever the path.

    All workers see NaN in the bucket, or zeros (`zeroes`), and nothing of what overflowed is kept.

    Without a GradScaler each bucket stands for itself: who was finite keeps its gradient, which goes out later, and
    who was not loses its own alone; a balance that fades has faded for the former and not for the latter. With one
    (`undoes`), which skips the optimizer's step whole, everything that outlives a step is afterwards as it was before,
    bit for bit, in buckets before and after the bad one too; that costs a copy of it, so only those who have a
    GradScaler pay.
    """

    def __init__(self, *, undoes: bool, zeroes: bool, warns: bool, keeps: bool) -> None:
        self.skipped_steps = 0
        self.zeroes = zeroes
        self._in_a_row = 0
        self._undoes = undoes
        self._warns = warns and not undoes  # a GradScaler may need more steps to find its scale
        self._keeps = keeps  # residuals, in units of a loss scale that nobody told of
        self._undo = Undo()
        self.overflowed = False  # in the step that is under way

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Note what a bucket is about to change."""
        if self._undoes:
            self._undo.remember(tensors)

    def overflow_(self, work: Work) -> None:
        """Nobody applies this bucket: what was withdrawn from its account is refunded."""
        self.overflowed = True
        if work.withdrawn is not None:
            work.account.refund_(work.withdrawn.positions, work.withdrawn.values)
        work.flat.fill_(0.0 if self.zeroes else torch.nan)

    def undo_(self, work: Work) -> None:
        """Restore all that a bucket's account keeps: what was withdrawn from it came too late."""
        assert self._undoes, "a worker that cannot undo is never late"
        self._undo.restore_(work.account.kept)

    def end_step_(self) -> bool:
        """Take the step back if that is asked for; whether it overflowed."""
        overflowed = self.overflowed
        if overflowed:
            self.skipped_steps += 1
            if self.skipped_steps == 1 and self._warns and self._keeps and not self.zeroes:
                _log.warning(
                    "a step gave Inf or NaN and is skipped; if a GradScaler scales the loss, give it to attach() as "
                    "grad_scaler=, so that what is kept follows its scale"
                )
        if self._undoes:
            if overflowed:
                self._undo.restore_()
            self._undo.forget()
        self.overflowed = False
        self._in_a_row = self._in_a_row + 1 if overflowed else 0
        if self._in_a_row == _MOST_IN_A_ROW and self.zeroes:
            raise LaconicError(
                f"{_MOST_IN_A_ROW} steps in a row gave Inf or NaN and were zeroed; go back to a checkpoint, "
                "with a smaller learning rate"
            )
        if self._in_a_row == _MOST_IN_A_ROW and self._warns:
            _log.warning(
                f"{_MOST_IN_A_ROW} steps in a row gave Inf or NaN: the weights probably hold one; go back to a "
                "checkpoint, and call optimizer.step() only where session.last_step_finite"
            )
        return overflowed
