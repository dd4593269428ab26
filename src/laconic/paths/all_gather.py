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
        wire = self.transport.wire or work.device
        frame = plan.shape.write_overflow(wire, **work.frame_id) if not work.finite else None
        sent = None
        if frame is None:
            with self.clock.time("select", work.device):
                due = work.account.due_(work.flat, 1 / work.scale)
                chosen, values = plan.withdraw_(work.account.balance, due)
                work.taken = Taken(plan.positions(chosen), plan.num_fixed, values)
            with self.clock.time("encode", work.device):
                codes, scale = self.quantize.encode(values.to(wire))
                sent = self.quantize.decode(codes, scale)[: values.numel()].to(work.device)
                frame = plan.shape.write(chosen.to(wire), codes, scale, **work.frame_id)
        frames = yield partial(self.transport.all_gather, frame, "sparse")
        with self.clock.time("decode", work.device):
            heard = [plan.shape.read(row, **work.frame_id, peer=peer) for peer, row in enumerate(frames)]
        return Said(heard, sent) if not any(contents.overflow for contents in heard) else None

    def apply_(self, work: Work, said: Said) -> None:
        self.plans.of(work).add_up_(work.flat, said.heard, work.scale / self.transport.num_workers)

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return {"passes": self.plans.passes()}
