"""The plain all-reduce: nothing is kept and nothing is copied that need not be."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from laconic.layout import Layout
from laconic.paths.path import Path, Said, Speech, Work
from laconic.quantize import FloatCode
from laconic.transport import ring_bytes


@dataclass
class PlainSum(Path):
    """g = sum over workers of g/M, in the gradient's own type or in 16 bits."""

    looks: ClassVar[bool] = False

    quantize: FloatCode

    def bytes_out(self, layout: Layout) -> int:
        return ring_bytes(self.quantize.num_bytes(layout.num_entries), self.transport.num_workers)

    def speak(self, work: Work) -> Speech:
        with self.clock.time("encode", work.device):
            # Multiplied first, as DDP does, so that the sum stays within the range of a 16-bit type.
            mine = work.flat.mul_(1 / self.transport.num_workers).to(self.quantize.sum_dtype(work.flat.dtype))
            codes = self.on_wire(mine)
        yield partial(self.transport.all_reduce_, codes, "dense")
        return Said(codes)

    def apply_(self, work: Work, said: Said) -> None:
        work.flat.copy_(said.heard, non_blocking=True)  # Inf and NaN survive a sum, so all workers see them alike
