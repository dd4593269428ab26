"""Floats that a network adds, out of accounts: what rounding loses is owed."""

from __future__ import annotations

from functools import partial

import torch

from laconic import kernels
from laconic.layout import Layout
from laconic.paths.clock import PhaseClock
from laconic.paths.path import Path, Said, Speech, Work
from laconic.paths.shared_choice import SharedChoice
from laconic.quantize import FloatCode
from laconic.transport import Transport, ring_bytes


class FloatSum(Path):
    """Deposit, withdraw what all workers send, round v/M to the code's type, and let the network add.

    It also is the dense step of every other scheme, in the gradient's own type. What a 16-bit sum rounds away in flight
    is nobody's to keep.
    """

    def __init__(self, choice: SharedChoice, quantize: FloatCode, transport: Transport, clock: PhaseClock) -> None:
        self._choice = choice
        self._quantize = quantize
        self._transport = transport
        self._clock = clock

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self._transport.num_workers
        return ring_bytes(self._quantize.num_bytes(self._choice.count(layout, num_workers)), num_workers)

    def speak(self, work: Work) -> Speech:
        num_workers = self._transport.num_workers
        with self._clock.time("select", work.device):
            values = self._choice.take_(work)
        with self._clock.time("encode", work.device):
            codes = values.div(num_workers).to(self._quantize.sum_dtype(work.flat.dtype))
            is_rounded = codes.dtype != torch.float32 and self._choice.keeps
            sent = codes.to(torch.float32).mul_(num_workers) if is_rounded else None
        yield partial(self._transport.all_reduce_, codes, "dense")
        with self._clock.time("decode", work.device):
            return Said(codes, sent) if kernels.all_finite(codes) else None

    def apply_(self, work: Work, said: Said) -> None:
        self._choice.write_(work, said.heard if work.scale == 1 else said.heard * work.scale)
