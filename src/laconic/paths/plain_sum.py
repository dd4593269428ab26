"""The plain all-reduce: nothing is kept and nothing is copied that need not be."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from laconic.layout import Layout
from laconic.paths.clock import PhaseClock
from laconic.paths.path import Path, Said, Speech, Work
from laconic.quantize import FloatCode
from laconic.transport import Transport, ring_bytes


class PlainSum(Path):
    """g = sum over workers of g/M, in the gradient's own type or in 16 bits."""

    looks: ClassVar[bool] = False

    def __init__(self, quantize: FloatCode, transport: Transport, clock: PhaseClock) -> None:
        self._quantize = quantize
        self._transport = transport
        self._clock = clock

    def bytes_out(self, layout: Layout) -> int:
        return ring_bytes(self._quantize.num_bytes(layout.num_entries), self._transport.num_workers)

    def speak(self, work: Work) -> Speech:
        with self._clock.time("encode", work.device):
            # Multiplied first, as DDP does, so that the sum stays within the range of a 16-bit type.
            codes = work.flat.mul_(1 / self._transport.num_workers).to(self._quantize.sum_dtype(work.flat.dtype))
        yield partial(self._transport.all_reduce_, codes, "dense")
        return Said(codes)

    def apply_(self, work: Work, said: Said) -> None:
        work.flat.copy_(said.heard)  # Inf and NaN survive a sum, so all workers see them alike
