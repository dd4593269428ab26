"""Everyone gets everyone's frame and adds by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from laconic.layout import Layout
from laconic.paths.clock import PhaseClock
from laconic.paths.frame_plan import FramePlans
from laconic.paths.path import Path, Said, Speech, Taken, Work
from laconic.quantize import Quantizer
from laconic.transport import Collectives
from laconic.wire import FrameShape


class Gathering(Path):
    """Deposit, choose, withdraw, write a frame; read everyone's and add them in rank order."""

    def __init__(self, plans: FramePlans, quantize: Quantizer, transport: Collectives, clock: PhaseClock) -> None:
        self._plans = plans
        self._quantize = quantize
        self._transport = transport
        self._clock = clock

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self._transport.num_workers
        plan = self._plans.target(layout, num_workers)
        shape = FrameShape(plan.num_entries, plan.k, plan.num_fixed, self._quantize)
        return (num_workers - 1) * shape.num_bytes

    def speak(self, work: Work) -> Speech:
        plan = self._plans.of(work)
        wire = self._transport.wire or work.device
        frame = plan.shape.write_overflow(wire, **work.frame_id) if not work.finite else None
        sent = None
        if frame is None:
            with self._clock.time("select", work.device):
                due = work.account.due_(work.flat, 1 / work.scale)
                chosen, values = plan.withdraw_(work.account.balance, due)
                work.taken = Taken(plan.positions(chosen), plan.num_fixed, values)
            with self._clock.time("encode", work.device):
                codes, scale = self._quantize.encode(values.to(wire))
                sent = self._quantize.decode(codes, scale)[: values.numel()].to(work.device)
                frame = plan.shape.write(chosen.to(wire), codes, scale, **work.frame_id)
        frames = yield partial(self._transport.all_gather, frame, "sparse")
        with self._clock.time("decode", work.device):
            heard = [plan.shape.read(row, **work.frame_id, peer=peer) for peer, row in enumerate(frames)]
        return Said(heard, sent) if not any(contents.overflow for contents in heard) else None

    def apply_(self, work: Work, said: Said) -> None:
        self._plans.of(work).add_up_(work.flat, said.heard, work.scale / self._transport.num_workers)

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return {"passes": self._plans.passes()}
