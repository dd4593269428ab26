"""Frames of selected entries: what is known of them beforehand, and the path on which everyone gets everyone's."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.kernels import Executor
from laconic.layout import Layout, positions_of
from laconic.memory import Due
from laconic.paths.path import Messages, Path, Withdrawn, Work
from laconic.quantize import Quantizer
from laconic.select import BucketPlan, Chooser
from laconic.transport import Collectives
from laconic.wire import EliasFano, FrameShape


def shape_of(select: Chooser, plan: BucketPlan, quantize: Quantizer) -> FrameShape:
    """The shape of the frames of a bucket, whose positions are in the selector's own code where it has one."""
    return FrameShape(plan.num_entries, plan.k, plan.num_fixed, quantize, select.index_code(plan))


class FramePlan:
    """A selector's plan for one bucket at one density, made once."""

    def __init__(
        self, select: Chooser, quantize: Quantizer, layout: Layout, density: float, device: torch.device
    ) -> None:
        self._select = select
        self.plan = select.plan(layout, density)
        self.shape = shape_of(select, self.plan, quantize)
        self.num_fixed = self.plan.num_fixed  # the entries that go at every step
        self.device = device
        self.searches = [kernels.new_search(w.stop - w.start, w.k, device) for w in self.plan.windows]

    @cached_property
    def fixed(self) -> Tensor:
        """Where the entries lie that go at every step, int64."""
        return positions_of(self.plan.fixed, self.device)

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can write and read its frames: that asks nothing of the host."""
        return self.shape.index.codec is EliasFano

    def positions(self, selected: Tensor) -> Tensor | None:
        """The fixed and the selected ones; None for every entry."""
        if self.num_fixed == self.plan.num_entries:
            return None
        return torch.cat([self.fixed, selected]) if self.num_fixed else selected.to(torch.int64)

    def withdraw_(self, balance: Tensor, due: Due) -> tuple[Tensor, Tensor]:
        """balance += due; take out the fixed and the selected entries: (selected positions, values of both)."""
        addend, factor = due
        if self.num_fixed == self.plan.num_entries:  # in order, and 1.2 M indices would take 20 ms
            whole = balance.clone() if addend is None else balance.add(addend, alpha=factor)
            balance.zero_()
            return torch.empty(0, dtype=torch.int32, device=self.device), whole
        if not self.num_fixed:
            return self._select.withdraw_(balance, addend, factor, self.plan, self.searches)
        owed = due.at(self.fixed)
        whole = balance.index_select(0, self.fixed).add_(owed)
        balance.index_copy_(0, self.fixed, -owed)  # the addition leaves zeros there, so that they are not selected
        selected, values = self._select.withdraw_(balance, addend, factor, self.plan, self.searches)
        balance.index_fill_(0, self.fixed, 0)
        return selected, torch.cat([whole, values])

    def add_up_(self, flat: Tensor, positions: Tensor, values: Tensor, factor: float) -> None:
        """flat = factor * the sum of what everyone sent, in rank order, so that all workers get the same bits."""
        total = flat.zero_() if flat.dtype == torch.float32 else torch.zeros_like(flat, dtype=torch.float32)
        whole, selected = values.mul_(factor).tensor_split([self.num_fixed], dim=1)
        if self.num_fixed:
            total[self.fixed] = sum(whole)  # from zero on, row by row
        kernels.add_at_(total, list(positions), list(selected))
        if total is not flat:
            flat.copy_(total)


class FramePlans:
    """The plans of all buckets."""

    def __init__(self, select: Chooser, quantize: Quantizer) -> None:
        self._select = select
        self._quantize = quantize
        self._plans: dict[tuple[Layout, float], FramePlan] = {}

    def of(self, work: Work) -> FramePlan:
        """That of a bucket at this step's density."""
        key = work.layout, work.density
        if key not in self._plans:
            self._plans[key] = FramePlan(self._select, self._quantize, *key, work.device)
        return self._plans[key]

    def target(self, layout: Layout, num_workers: int) -> BucketPlan:
        """What goes of a bucket among M workers once the trigger has reached its target."""
        return self._select.plan(layout, self._select.density_among(num_workers))

    def target_shape(self, layout: Layout, num_workers: int) -> FrameShape:
        """The shape of a worker's frames of that."""
        return shape_of(self._select, self.target(layout, num_workers), self._quantize)

    def passes(self) -> float | None:
        """How often a selection went over its entries, on average; 1 is the least."""
        searches = [search.tolist() for plan in self._plans.values() for search in plan.searches]
        calls = sum(search[kernels.CALLS] for search in searches)
        return sum(search[kernels.PASSES] for search in searches) / calls if calls else None


@dataclass
class Gathering(Path):
    """Deposit, select, withdraw, write a frame; read everyone's and add them in rank order.

    A captured bucket is two CUDA graphs: all that comes before its frame leaves, and all that comes after. The second
    applies frames before they are known to be undamaged; if one is not, it is an error, and nobody goes on anyway.
    """

    transport: Collectives
    plans: FramePlans
    quantize: Quantizer
    executor: Executor
    asks_host: bool = True  # so that it cannot be captured

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self.transport.num_workers
        return (num_workers - 1) * self.plans.target_shape(layout, num_workers).num_bytes

    def captures(self, work: Work) -> bool:
        on_gpu = self.executor.captures(work.flat, self.transport.wire)
        return on_gpu and not self.asks_host and self.plans.of(work).is_capturable

    def exchange(self, work: Work) -> Messages:
        plan = self.plans.of(work)
        captures = self.captures(work)
        wire = self.transport.wire
        if work.finite:
            step = self.executor.step("encode", plan, work.device, wire, captures=captures)
            head = [torch.from_numpy(np.array(plan.shape.head(**work.frame_id), np.int32))] if captures else []
            uses = work.flat, work.account.balance, work.scale
            with self.clock.time("encode", work.device):
                work.withdrawn, (frame,) = step.run(partial(self._encode, work, plan), uses, *head)
        else:
            frame = plan.shape.write_overflow(wire or work.device, **work.frame_id)
        frames = yield partial(self.transport.all_gather, frame, "sparse")
        if captures:
            with self.clock.time("decode", frames.device):  # the host: there is nothing on the device to wait for
                if plan.shape.are_foretold(frames, **work.frame_id):
                    return frames  # read by the graph that adds them up
        with self.clock.time("decode", work.device):
            return plan.shape.read_all(frames, work.device, **work.frame_id)

    def _encode(self, work: Work, plan: FramePlan, head: Tensor | None = None) -> tuple[Withdrawn, list[Tensor]]:
        """What goes out, and the frame that says it; a captured one has its header from the host."""
        flag = work.flag_nonfinite_() if head is not None else None
        due = work.account.due_(work.flat, 1 / work.scale)
        selected, values = plan.withdraw_(work.account.balance, due)
        codes, scale = self.quantize.encode(values)
        sent = self.quantize.decode(codes, scale)[: values.numel()]
        if head is None or flag is None:
            frame = plan.shape.write(selected, codes, scale, **work.frame_id)
        else:
            frame = plan.shape.write_after(head, selected, codes, scale, flag)
        return Withdrawn(plan.positions(selected), plan.num_fixed, values, sent), [frame]

    def finish_(self, work: Work, received: Any, *, refunds: bool) -> None:
        if isinstance(received, Tensor):
            self._finish_captured_(work, received, refunds=refunds)
        else:
            super().finish_(work, received, refunds=refunds)

    def _finish_captured_(self, work: Work, frames: Tensor, *, refunds: bool) -> None:
        """Read frames whose headers are as foretold, and finish, in one graph."""
        plan = self.plans.of(work)
        staged = self.executor.staged(frames, work.device)

        def body() -> tuple[None, list[Tensor]]:
            damaged = torch.zeros(1, dtype=torch.int32, device=work.device)
            rows = plan.shape.read_later(staged, damaged)
            super(Gathering, self).finish_(work, rows, refunds=refunds)
            return None, [damaged]

        out = work.withdrawn
        assert out is not None and out.positions is not None and out.sent is not None, "what goes whole has no index"
        uses = work.flat, work.account.balance, work.scale, staged, out.positions, out.values, out.sent
        step = self.executor.step("apply", plan, work.device, self.transport.wire, captures=True)
        _, (damaged,) = step.run(body, uses)
        kernels.wait_for_stream(work.device)
        if damaged.numpy()[0]:
            plan.shape.read_all(frames, work.device, **work.frame_id)  # names the sender
            raise FrameError(f"frames of bucket {work.number}, step {work.step} are damaged on this device alone")

    def apply_(self, work: Work, received: tuple[Tensor, Tensor]) -> None:
        self.plans.of(work).add_up_(work.flat, *received, work.scale / self.transport.num_workers)

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return {"passes": self.plans.passes()}
