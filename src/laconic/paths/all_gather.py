"""Everyone gets everyone's frame and adds by itself."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.device import Executor, Step
from laconic.layout import Layout
from laconic.paths.frame_plan import FramePlan, FramePlans
from laconic.paths.path import Messages, Path, Withdrawn, Work
from laconic.quantize import Quantizer
from laconic.transport import Collectives
from laconic.wire import FrameShape


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
        plan = self.plans.target(layout, num_workers)
        shape = FrameShape(plan.num_entries, plan.k, plan.num_fixed, self.quantize)
        return (num_workers - 1) * shape.num_bytes

    def captures(self, work: Work) -> bool:
        on_gpu = self.executor.captures(work.flat, self.transport.wire)
        return on_gpu and not self.asks_host and self.plans.of(work).is_capturable

    def exchange(self, work: Work) -> Messages:
        plan = self.plans.of(work)
        captures = self.captures(work)
        wire = self.transport.wire
        if work.finite:
            step = self.executor.captured("encode", plan, work.device) if captures else Step[Withdrawn](work.device, wire)
            head = [torch.tensor(plan.shape.head(**work.frame_id), dtype=torch.int32)] if captures else []
            uses = work.flat, work.account.balance, work.scale
            with self.clock.time("encode", work.device):
                work.withdrawn, (frame,) = step.run(partial(self._encode, work, plan), uses, *head)
        else:
            frame = plan.shape.write_overflow(wire or work.device, **work.frame_id)
        frames = yield partial(self.transport.all_gather, frame, "sparse")
        with self.clock.time("decode", work.device):
            if captures and plan.shape.are_foretold(frames, **work.frame_id):
                return frames  # read by the graph that adds them up
            return plan.shape.read_all(frames, work.device, **work.frame_id)

    def _encode(self, work: Work, plan: FramePlan, *head: Tensor) -> tuple[Withdrawn, list[Tensor]]:
        """What goes out, and the frame that says it; a captured one has its header from the host."""
        flag = work.flag_nonfinite_() if head else None
        selected, values = plan.withdraw_(work.account.balance, work.account.due_(work.flat, 1 / work.scale))
        codes, scale = self.quantize.encode(values)
        sent = self.quantize.decode(codes, scale)[: values.numel()]
        if flag is None:
            frame = plan.shape.write(selected, codes, scale, **work.frame_id)
        else:
            frame = plan.shape.write_after(*head, selected, codes, scale, flag)
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
        _, (damaged,) = self.executor.captured("apply", plan, work.device).run(body, uses)
        if damaged.any():
            plan.shape.read_all(frames, work.device, **work.frame_id)  # names the sender
            raise FrameError(f"frames of bucket {work.number}, step {work.step} are damaged on this device alone")

    def apply_(self, work: Work, received: tuple[Tensor, Tensor]) -> None:
        self.plans.of(work).add_up_(work.flat, *received, work.scale / self.transport.num_workers)

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return {"passes": self.plans.passes()}
