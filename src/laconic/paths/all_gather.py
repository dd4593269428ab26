"""Everyone gets everyone's frame and adds by itself."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from laconic.layout import Layout
from laconic.paths.frame_plan import FramePlans
from laconic.paths.path import Path, Said, Speech, Taken, Work
from laconic.quantize import Quantizer
from laconic.transport import Collectives
from laconic.wire import FrameShape


@dataclass
class Gathering(Path):
    """Deposit, choose, withdraw, write a frame; read everyone's and add them in rank order."""

    transport: Collectives
    plans: FramePlans
    quantize: Quantizer

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self.transport.num_workers
        plan = self.plans.target(layout, num_workers)
        shape = FrameShape(plan.num_entries, plan.k, plan.num_fixed, self.quantize)
        return (num_workers - 1) * shape.num_bytes

    def speak(self, work: Work) -> Speech:
        plan = self.plans.of(work)
        sent = None
        if work.finite:
            with self.clock.time("select", work.device):
                due = work.account.due_(work.flat, 1 / work.scale)
                chosen, values = plan.withdraw_(work.account.balance, due)
                work.taken = Taken(plan.positions(chosen), plan.num_fixed, values)
            with self.clock.time("encode", work.device):
                codes, scale = self.quantize.encode(values)
                sent = self.quantize.decode(codes, scale)[: values.numel()]
                frame = self.on_wire(plan.shape.write(chosen, codes, scale, **work.frame_id))
        else:
            frame = plan.shape.write_overflow(self.transport.wire or work.device, **work.frame_id)
        frames = yield partial(self.transport.all_gather, frame, "sparse")
        with self.clock.time("decode", work.device):
            heard = plan.shape.read_all(frames, work.device, **work.frame_id)
        return Said(heard, sent) if heard is not None else None

    def apply_(self, work: Work, said: Said) -> None:
        positions, values = said.heard
        self.plans.of(work).add_up_(work.flat, positions, values, work.scale / self.transport.num_workers)

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return {"passes": self.plans.passes()}
