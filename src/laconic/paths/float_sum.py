"""Floats that a network adds, out of accounts: what rounding loses is owed."""

from dataclasses import dataclass
from functools import partial

import torch

from laconic import kernels
from laconic.layout import Layout
from laconic.paths.path import Path, Said, Speech, Work
from laconic.paths.shared_choice import SharedChoice
from laconic.quantize import FloatCode
from laconic.transport import ring_bytes

_FP16_TOP = 2.0**15  # half of its range: each addition in flight may round up


@dataclass
class FloatSum(Path):
    """Deposit, withdraw what all workers send, round v/M to the code's type, and let the network add.

    It also is the dense step of every other scheme, in the gradient's own type. What a 16-bit sum rounds away in flight
    is nobody's to keep.
    """

    choice: SharedChoice
    quantize: FloatCode

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self.transport.num_workers
        return ring_bytes(self.quantize.num_bytes(self.choice.count(layout, num_workers)), num_workers)

    def speak(self, work: Work) -> Speech:
        num_workers = self.transport.num_workers
        with self.clock.time("select", work.device):
            values = self.choice.take_(work)
        with self.clock.time("encode", work.device):
            dtype = self.quantize.sum_dtype(work.flat.dtype)
            is_rounded = dtype != torch.float32 and self.choice.keeps
            if is_rounded and dtype == torch.float16:  # what is beyond its range is owed, and no sum is Inf for ever
                values = values.clamp(-_FP16_TOP, _FP16_TOP)
            codes = values.div(num_workers).to(dtype)
            sent = codes.to(torch.float32).mul_(num_workers) if is_rounded else None
            codes = self.on_wire(codes)
        yield partial(self.transport.all_reduce_, codes, "dense")
        with self.clock.time("decode", work.device):
            codes = codes.to(work.device, non_blocking=True)
            return Said(codes, sent) if kernels.all_finite(codes) else None

    def apply_(self, work: Work, said: Said) -> None:
        self.choice.write_(work, said.heard if work.scale == 1 else said.heard * work.scale)
