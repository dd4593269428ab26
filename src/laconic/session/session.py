"""One worker's running scheme: each bucket goes through it in straight-line code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.exchange import Server, Silent
from laconic.layout import Bucket, Layout, positions_of
from laconic.memory import Ledger
from laconic.quantize import Grid
from laconic.scheme import Scheme
from laconic.select import Overlap
from laconic.server.client import ServerClient
from laconic.server.owner import Owner
from laconic.session import state
from laconic.session.bucket_plan import BucketPlan
from laconic.session.consulting import Consulting, Unions
from laconic.session.integers import IntegerSum
from laconic.session.past import Past, Pasts
from laconic.session.regroup import regrouped
from laconic.session.stats import PhaseClock, Stats
from laconic.session.summing import Kept, restore_
from laconic.transport import Transport, ring_bytes


class Session(Consulting):
    """Exchanges buckets under a scheme over a transport; every worker passes the same buckets in the same order.

    `loss_scale` tells the current scale of a GradScaler: balances are kept in unscaled units, and a step in which some
    worker saw Inf or NaN is undone bit for bit. `holds_idle` leaves the account of a parameter untouched in a step
    that gave it no gradient, because DDP drops what it receives for a parameter that no worker used.
    """

    def __init__(
        self,
        scheme: Scheme,
        transport: Transport,
        *,
        loss_scale: Callable[[], float] | None = None,
        holds_idle: bool = False,
    ) -> None:
        self.scheme = scheme
        self.transport = transport
        self._kernels = ""  # those of the gradients' device, once there are any
        self._loss_scale = loss_scale
        self._holds_idle = holds_idle
        self._ledger = Ledger(scheme.memory)
        self._clock = PhaseClock()
        self._step = self._first_step = 0  # the second is that of a checkpoint
        self._skipped_steps = 0
        self._dense_bytes_out = 0
        self._layouts: list[Layout] = []  # of the last whole step
        self._plans: dict[tuple[Layout, float], BucketPlan] = {}
        self._shared_plans = {}
        self._resumed_layouts: list[Layout] = []
        self._integers = None
        if isinstance(scheme.quantize, Grid):
            self._integers = IntegerSum(scheme.quantize, scheme.carrier(transport.num_workers), transport, self._clock)
        self._owner, self._cuts, self._unions = None, {}, Unions()
        if isinstance(scheme.exchange, Server) and transport.owned_share is not None:
            self._owner = Owner(
                scheme,
                transport.owned_share,
                transport.num_shares,
                undoes=loss_scale is not None,
                holds_idle=holds_idle,
            )
        self._pasts = Ledger(Pasts()) if isinstance(scheme.select, Overlap) else None
        self._begin_step()

    def _begin_step(self) -> None:
        # Where nothing is kept the scale stays on: a 16-bit type needs it.
        self._scale = self._loss_scale() if self._loss_scale and self.scheme.memory.kinds else 1.0
        self._overflowed = False
        self._undo: list[tuple[Kept, list[Tensor]]] = []
        self._seen: list[Layout] = []

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

    def exchange_(self, bucket: Bucket) -> None:
        """Overwrite bucket.flat with the mean over workers of what the scheme sends."""
        if not self._seen:
            self._kernels = kernels.backend(bucket.flat.device)
            self._begin_step()
        self._seen.append(bucket.layout)
        self._dense_bytes_out += ring_bytes(4 * bucket.layout.num_entries, self.transport.num_workers)
        target = self.scheme.select.density_among(self.transport.num_workers)
        density = self.scheme.trigger.density(self._step - self._skipped_steps, target)
        if isinstance(self.scheme.exchange, Silent):
            pass
        elif self.scheme.exchange.adds_in_flight or density >= 1 > target:
            self._reduce_(bucket, density)
        elif isinstance(self.scheme.exchange, Server):
            self._consult_(bucket, self._plan(bucket.layout, density, bucket.flat.device), density)
        else:
            self._gather_(bucket, density)
        if bucket.is_last:
            self._end_step()

    def _gather_(self, bucket: Bucket, density: float) -> None:
        """Deposit, choose, withdraw, write a frame; read everyone's and add them in rank order."""
        flat, device, quantize = bucket.flat, bucket.flat.device, self.scheme.frame_answers[1]
        plan, wire = self._plan(bucket.layout, density, device), self.transport.wire or device
        frame_id = {"step": self._step, "bucket": len(self._seen) - 1}
        account = self._ledger.open(bucket.layout, device)
        if self._loss_scale is not None:
            self._undo_later(account)
        with self._held(account, bucket):
            with self._clock.time("select", device):
                finite = kernels.all_finite(flat)
                if finite:
                    due = account.due_(flat, 1 / self._scale)
                    chosen, values = plan.withdraw_(account.balance, due)
            with self._clock.time("encode", device):
                if finite:
                    codes, scale = quantize.encode(values.to(wire))
                    sent_at = torch.cat([plan.fixed, chosen])
                    sent = quantize.decode(codes, scale)[: values.numel()].to(device)
                    frame = plan.shape.write(chosen.to(wire), codes, scale, **frame_id)
                else:
                    frame = plan.shape.write_overflow(wire, **frame_id)
            with self._clock.time("exchange", device):
                frames = self.transport.all_gather(frame, "sparse")
            with self._clock.time("decode", device):
                heard = [plan.shape.read(row, **frame_id, peer=peer) for peer, row in enumerate(frames)]
                if any(contents.overflow for contents in heard):
                    self._overflowed = True
                    if finite:
                        account.refund_(sent_at, values)  # nobody will apply it
                    flat.fill_(torch.nan)
                else:
                    if self.scheme.memory.refunds:
                        account.refund_(sent_at, values - sent)
                    account.sent_(chosen, sent[plan.fixed.numel() :])
                    plan.add_up_(flat, heard, self._scale / self.transport.num_workers)

    def _plan(self, layout: Layout, density: float, device: torch.device) -> BucketPlan:
        key = (layout, density)
        if key not in self._plans:
            self._plans[key] = BucketPlan(self.scheme, layout, density, device)
        return self._plans[key]

    def _end_step(self) -> None:
        if self._overflowed:
            self._skipped_steps += 1
            for account, before in self._undo:
                restore_(account, before)
                if isinstance(account, Past):
                    account.restored()
        self._step += 1
        self._layouts, self._seen, self._undo = self._seen, [], []

    def stats(self, *, ages: bool = False) -> Stats:
        """Bytes out and in, by kind; seconds by phase; the ratio to dense.

        With `ages` also how long entries wait, where a score decides: a pass over all of them.
        """
        traffic = self.transport.traffic
        oldest, never = self._ages() if ages and self._pasts is not None else (None, None)
        return Stats(
            scheme=str(self.scheme),
            kernels=self._kernels,
            num_workers=self.transport.num_workers,
            steps=self._step,
            first_step=self._first_step,
            skipped_steps=self._skipped_steps,
            bytes_out=traffic.bytes_out,
            bytes_in=traffic.bytes_in,
            dense_bytes_out=self._dense_bytes_out,
            by_kind=traffic.copy(),
            seconds=dict(self._clock.seconds),
            passes=self._passes(),
            union=self._unions.num_answered / self._unions.num_sent if self._unions.num_sent else None,
            oldest_residual=oldest,
            never_sent=never,
            num_living=self.transport.num_living if isinstance(self.transport, ServerClient) else None,
            held_bytes=self._owner.num_bytes if self._owner is not None else 0,
        )

    @property
    def unions(self) -> Unions:
        """Sizes of the unions so far."""
        return replace(self._unions)

    def _ages(self) -> tuple[int, float]:
        """(steps for which what is owed longest has waited, share of entries that were never sent)."""
        assert self._pasts is not None
        oldest = num_never = num_entries = 0
        for layout, past in self._pasts.opened.items():
            free = self._free_of(layout, past.past.device)
            sent_at, owed = past.sent_at[free], self._ledger.open(layout, past.past.device).balance[free] != 0
            num_entries += free.numel()
            num_never += int((sent_at == 0).sum())
            if bool(owed.any()):
                oldest = max(oldest, self._step - int(sent_at[owed].min()))
        return oldest, num_never / max(1, num_entries)

    def _free_of(self, layout: Layout, device: torch.device) -> Tensor:
        """The entries that are chosen among; the others go at every step."""
        select = self.scheme.select
        fixed = {span.name for span in select.plan(layout, select.density).fixed}
        return positions_of([span for span in layout.spans if span.name not in fixed], device)

    def _passes(self) -> float | None:
        """How often a selection went over its entries, on average; 1 is the least."""
        searches = [search.tolist() for plan in self._plans.values() for search in plan.searches]
        calls = sum(search[kernels.CALLS] for search in searches)
        return sum(search[kernels.PASSES] for search in searches) / calls if calls else None

    def state_dict(self) -> dict[str, Any]:
        """This worker's state as plain tensors and numbers, keyed by parameter name; save one per rank."""
        return state.save(
            self.scheme,
            self.transport,
            self._step,
            self._skipped_steps,
            self._layouts,
            self._ledger.state_dict(),
            past=self._pasts.state_dict() if self._pasts is not None else {},
            owner=self._owner.state_dict() if self._owner is not None else {},
        )

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's state, or from a list of all ranks' states when their number has changed."""
        self._step, self._skipped_steps, self._resumed_layouts, kept = state.load(saved, self.scheme, self.transport)
        self._first_step = self._step
        self._ledger.load_state_dict(kept)
        if self._pasts is not None:
            self._pasts.load_state_dict(state.load_past(saved, self.transport))
        if self._owner is not None:
            self._owner.load_state_dict(state.load_owner(saved, self.transport))
