"""Paths that keep nothing: every gradient goes as it is, to all workers or to one other."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from laconic.exchange import matching
from laconic.layout import Layout
from laconic.paths.path import Messages, Path, Work
from laconic.quantize import FloatCode, Quantizer
from laconic.transport import Collectives, ring_bytes


@dataclass
class PlainSum(Path):
    """g = sum over workers of g/M, in the gradient's own type or in 16 bits."""

    checks_finite: ClassVar[bool] = False

    quantize: FloatCode

    def bytes_out(self, layout: Layout) -> int:
        return ring_bytes(self.quantize.num_bytes(layout.num_entries), self.transport.num_workers)

    def exchange(self, work: Work) -> Messages:
        with self.clock.time("encode", work.device):
            # Multiplied first, as DDP does, so that the sum stays within the range of a 16-bit type.
            share = work.flat.mul_(1 / self.transport.num_workers).to(self.quantize.sum_dtype(work.flat.dtype))
            codes = self.on_wire(share)
        yield partial(self.transport.sum_gradients_, codes, "dense")
        return codes

    def apply_(self, work: Work, received: Tensor) -> None:
        work.flat.copy_(received, non_blocking=True)  # Inf and NaN survive a sum, so all workers see them alike


@dataclass
class PairMean(Path):
    """x_i += (x_j as sent - x_i as sent)/2, where i and j are a pair drawn from (seed, step).

    So the sum over the two is unchanged, whatever rounding does: what it loses of a worker's own stays there. A worker
    without a partner keeps its own. Where one of two is not finite, both become so, and no other pair learns of it.
    """

    checks_finite: ClassVar[bool] = False

    transport: Collectives
    quantize: Quantizer
    seed: int

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self.transport.num_workers
        num_paired = num_workers - num_workers % 2  # one without a partner sends nothing: this is the mean
        return self.quantize.num_bytes(layout.num_entries) * num_paired // num_workers

    def exchange(self, work: Work) -> Messages:
        partner = matching("uniform", self.seed, work.step, self.transport.num_workers)[self.transport.rank]
        with self.clock.time("encode", work.device):
            own = work.flat.to(self.quantize.code_dtype)
            frame = self.on_wire(own).view(torch.uint8)  # not every backend knows every type
        peers = yield partial(self.transport.sendrecv, frame, partner, "pairs", frame.numel())
        return own, peers.view(own.dtype)

    def apply_(self, work: Work, received: tuple[Tensor, Tensor]) -> None:
        own, peers = (codes.to(work.device, torch.float32) for codes in received)
        work.flat.add_(peers - own, alpha=0.5)
