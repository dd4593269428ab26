"""One worker's running scheme: one step, one body, whatever path the buckets take."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from laconic import kernels
from laconic.fault_points import fault_point
from laconic.layout import Bucket, Layout
from laconic.memory import Account, Ledger, Nothing
from laconic.memory.undo import SetAside
from laconic.paths import Path, PhaseClock, Said, Taken, Work, dense_path, path_for
from laconic.scheme import Scheme
from laconic.session import state
from laconic.session.overflow import TOO_LARGE, OverflowRule
from laconic.session.regroup import regrouped
from laconic.session.stats import Stats
from laconic.session.talk import Talk
from laconic.transport import Transport, ring_bytes


class Session:
    """Exchanges buckets under a scheme over a transport; every worker passes the same buckets in the same order.

    `loss_scale` tells the current scale of a GradScaler: balances are kept in unscaled units, and a step in which some
    worker saw Inf or NaN is undone bit for bit, as it is with `undoes`. `holds_idle` leaves the account of a parameter
    untouched in a step that gave it no gradient, since DDP drops what it receives for a parameter that no worker used.
    `zeroes` makes a bucket zero, not NaN, in which some worker saw Inf or NaN, and ten such steps in a row an error.
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
    ) -> None:
        self.scheme = scheme
        self.transport = transport
        self._loss_scale = loss_scale
        self._holds_idle = holds_idle
        self._clock = PhaseClock()
        self._ledger: Ledger[Account] = Ledger(scheme.memory)
        self._is_asked = not undoes  # whether a last step was finite; outer steps look for themselves
        undoes = undoes or loss_scale is not None
        self._path = path_for(scheme, transport, self._clock, self._ledger, undoes=undoes, holds_idle=holds_idle)
        self._dense = dense_path(scheme, transport, self._clock, keeps=bool(scheme.memory.kinds))  # of a warm-up
        self._plain = dense_path(scheme, transport, self._clock, keeps=False)
        self._overflow = OverflowRule(undoes=undoes, zeroes=zeroes)
        self._kernels = ""  # those of the gradients' device, once there are any
        self._step = 0
        self._first_step = 0  # that of a checkpoint
        self._scale = 1.0
        self._dense_bytes_out = 0
        self._layouts: list[Layout] = []  # of the last whole step
        self._seen: list[Layout] = []  # of this one, as far as its buckets have come
        self._is_whole = False  # whether all of them have
        self._num_ended = 0
        self._last_overflowed = False
        self._last_unlooked: list[Tensor] = []  # what the last step made of buckets that nobody looked at
        self._unlooked: list[Tensor] = []
        self._resumed_layouts: list[Layout] = []

    def exchange_(self, bucket: Bucket) -> None:
        """Overwrite bucket.flat with the mean over workers of what the scheme sends."""
        talk = self.begin(bucket)
        while talk.message is not None:
            heard = self.say(talk)
            try:
                talk.go_on(heard)
            except BaseException:
                self.transport.hang_up()  # others may wait for what this worker would have said next
                raise
        self.end_(talk)

    def begin(self, bucket: Bucket) -> Talk:
        """Choose and encode, as far as the first message."""
        fault_point("bucket.begin", bucket)
        work = self._open(bucket)
        path = self._path_of(work)
        if path.looks:
            self._look_(work, path)
        talk = Talk(work, path, path.speak(work))
        talk.go_on()
        fault_point("bucket.encoded", bucket)
        return talk

    def say(self, talk: Talk) -> Any:
        """Send its next message; what all said."""
        assert talk.message is not None
        fault_point("bucket.send", talk.work.bucket)
        with self._clock.time("exchange", self.transport.wire or talk.work.device):
            heard = talk.message()
        talk.was_late = self.transport.was_late
        return heard

    def end_(self, talk: Talk) -> None:
        """Apply what was heard; with the last bucket of a step the step ends."""
        fault_point("bucket.apply", talk.work.bucket)
        talk.work.bucket.was_late = talk.was_late and talk.said is not None
        self._close_(talk.work, talk.path, talk.said)
        self._num_ended += 1
        if self._is_whole and self._num_ended == len(self._seen):
            self._end_step()
        fault_point("bucket.applied", talk.work.bucket)

    def _open(self, bucket: Bucket) -> Work:
        """When, how much of it, and the account that it goes through."""
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

    @property
    def _target(self) -> float:
        """The share of entries that the selector aims to send."""
        return self.scheme.select.density_among(self.transport.num_workers)

    def _path_of(self, work: Work) -> Path:
        """The scheme's, or that of a dense step where the scheme's own is sparse."""
        if work.bucket.is_plain:
            return self._plain
        return self._dense if work.density >= 1 > self._target else self._path

    def _look_(self, work: Work, path: Path) -> None:
        """Whether the gradient is finite; what is kept is noted for an undo, and that of idle parameters set aside."""
        self._overflow.remember([*work.account.kept, *path.kept(work)])
        looks_itself = path.looks_itself(work)
        if looks_itself and not self._holds_idle:
            return
        with self._clock.time("select", work.device):
            work.finite = looks_itself or kernels.all_finite(work.flat, work.too_large)
            spans = work.layout.spans if self._holds_idle else ()
            idle = [slice(span.start, span.stop) for span in spans if not work.flat[span.start : span.stop].any()]
            work.aside = SetAside([tensor[span] for tensor in work.account.kept for span in idle])

    def _close_(self, work: Work, path: Path, said: Said | None) -> None:
        """Owe what rounding lost and apply what was heard; or, where someone was not finite, neither.

        Of what was said too late everything is owed.
        """
        with self._clock.time("decode", work.device):
            if said is None:
                self._overflow.overflow_(work)
            else:
                if work.bucket.was_late:
                    self._overflow.take_back_(work)
                elif work.taken is not None:
                    _settle_(work.account, work.taken, said.sent, refunds=self.scheme.memory.refunds)
                path.apply_(work, said)
                if not path.looks:
                    self._heard_unlooked_(work)
            work.aside.restore_()

    def _heard_unlooked_(self, work: Work) -> None:
        """Inf and NaN survive a plain sum: found now where they are to be zeros, or when someone asks."""
        if not self._overflow.zeroes:
            self._unlooked += [work.flat] if self._is_asked else []
        elif not kernels.all_finite(work.flat):
            self._overflow.overflow_(work)

    @property
    def last_step_finite(self) -> bool:
        """Whether no worker gave the last step Inf or NaN; to be asked while the gradients are still there."""
        return not self._last_overflowed and all(map(kernels.all_finite, self._last_unlooked))

    @property
    def finite_so_far(self) -> bool:
        """Whether no worker gave Inf or NaN to the step that is under way."""
        return not self._overflow.overflowed and all(map(kernels.all_finite, self._unlooked))

    def end_step_(self, *, finite: bool) -> None:
        """End a step none of whose buckets was said to be the last; it overflowed where others say so."""
        self._overflow.overflowed |= not finite
        self._unlooked = []
        self._end_step()

    def _end_step(self) -> None:
        self._last_overflowed = self._overflow.end_step_()
        if self._last_overflowed:
            self._path.restored()
        self._last_unlooked = self._unlooked
        self._unlooked = []
        self._step += 1
        self._layouts = self._seen
        self._seen = []
        self._is_whole = False
        self._num_ended = 0

    @property
    def wants_whole_step(self) -> bool:
        """Whether the next step must come in one piece, to `exchange_step_`."""
        return bool(self._resumed_layouts)

    def exchange_step_(self, buckets: Sequence[Bucket]) -> None:
        """Overwrite all buckets of one step with the mean over workers.

        The first step after a resume runs on the buckets of the step before the save, since DDP has only its first
        guess at them yet; selection per bucket, and the order in which an all-reduce adds, depend on the cut.
        """
        with regrouped(buckets, self._resumed_layouts) as cut:
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
        self._step = progress.step
        self._first_step = progress.step
        self._overflow.skipped_steps = progress.skipped_steps
        self._resumed_layouts = progress.layouts
        self._ledger.load_state_dict(kept)


def _settle_(account: Account, taken: Taken, sent: Tensor | None, *, refunds: bool) -> None:
    """Put back what rounding lost of what was taken, and note what has gone out."""
    if sent is not None and refunds:
        account.refund_(taken.positions, taken.values - sent)
    if taken.positions is not None:
        gone = taken.values if sent is None else sent
        account.sent_(taken.positions[taken.num_fixed :], gone[taken.num_fixed :])
