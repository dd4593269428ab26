"""Two workers at a time go to their middle."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from laconic.exchange import matching
from laconic.layout import Layout
from laconic.paths.path import Path, Said, Speech, Work
from laconic.quantize import Quantizer
from laconic.transport import Collectives


@dataclass
class PairMean(Path):
    """x_i += (x_j as sent - x_i as sent)/2, where i and j are a pair drawn from (seed, step).

    So the sum over the two is unchanged, whatever rounding does: what it loses of a worker's own stays there. Who has
    no partner keeps its own. Where one of two is not finite, both become so, and no other pair hears of it.
    """

    looks: ClassVar[bool] = False

    transport: Collectives
    quantize: Quantizer
    seed: int

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self.transport.num_workers
        num_paired = num_workers - num_workers % 2  # whoever stands alone sends nothing: this is the mean
        return self.quantize.num_bytes(layout.num_entries) * num_paired // num_workers

    def speak(self, work: Work) -> Speech:
        partner = matching("uniform", self.seed, work.step, self.transport.num_workers)[self.transport.rank]
        with self.clock.time("encode", work.device):
            mine = work.flat.to(self.quantize.code_dtype)
            frame = self.on_wire(mine).view(torch.uint8)  # not every backend knows every type
        theirs = yield partial(self.transport.sendrecv, frame, partner, "pairs", frame.numel())
        return Said((mine, theirs.view(mine.dtype)))

    def apply_(self, work: Work, said: Said) -> None:
        mine, theirs = (codes.to(work.device, torch.float32) for codes in said.heard)
        work.flat.add_(theirs - mine, alpha=0.5)
