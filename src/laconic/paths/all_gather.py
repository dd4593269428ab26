"""Everyone gets everyone's frame and adds by itself."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from laconic.errors import FrameError
from laconic.layout import Layout
from laconic.paths.frame_plan import FramePlan, FramePlans
from laconic.paths.gathering_on_gpu import BucketOnGpu, Stations
from laconic.paths.path import Path, Said, Speech, Taken, Work
from laconic.quantize import Quantizer
from laconic.transport import Collectives


@dataclass
class Gathering(Path):
    """Deposit, choose, withdraw, write a frame; read everyone's and add them in rank order.

    Where that asks nothing of the host (`replays`), a GPU whose frames leave from the host does it in two recordings.
    """

    transport: Collectives
    plans: FramePlans
    quantize: Quantizer
    replays: bool = False
    _on_gpu: dict[FramePlan, BucketOnGpu] = field(default_factory=dict)
    _stations: Stations | None = None

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self.transport.num_workers
        return (num_workers - 1) * self.plans.target_shape(layout, num_workers).num_bytes

    def looks_itself(self, work: Work) -> bool:
        return self.replays and self.comes_from_gpu(work) and self.plans.of(work).is_recordable

    def speak(self, work: Work) -> Speech:
        plan = self.plans.of(work)
        if self.looks_itself(work):
            return (yield from self._speak_on_gpu(work, plan))
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

    def _speak_on_gpu(self, work: Work, plan: FramePlan) -> Speech:
        """The same, but what was heard is applied before it is known to be undamaged: then nobody goes on anyway."""
        if plan not in self._on_gpu:
            self._stations = self._stations or Stations(work.device, self.transport.num_workers)
            self._on_gpu[plan] = BucketOnGpu(plan, self.quantize, self._stations)
        bucket = self._on_gpu[plan]
        with self.clock.time("encode", work.device):
            bucket.write(work)
        frames = yield partial(self.transport.all_gather, bucket.frame(work), "sparse")
        with self.clock.time("decode", work.device):
            is_foretold = plan.shape.are_foretold(frames, **work.frame_id)
            if is_foretold:
                bucket.apply_(work, frames)
        if not is_foretold or bucket.is_damaged:
            if plan.shape.read_all(frames, work.device, **work.frame_id) is None:
                return None
            raise FrameError(f"frames of bucket {work.number}, step {work.step} are damaged on this device alone")
        work.taken = None
        return Said(None)

    def apply_(self, work: Work, said: Said) -> None:
        if said.heard is not None:
            positions, values = said.heard
            self.plans.of(work).add_up_(work.flat, positions, values, work.scale / self.transport.num_workers)

    def figures(self, *, ages: bool = False) -> dict[str, Any]:
        return {"passes": self.plans.passes()}
