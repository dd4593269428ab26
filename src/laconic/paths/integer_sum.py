"""Integers that add up: agree on a grid, round onto it, let the network add the codes, read the mean."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels import key_of
from laconic.layout import Layout
from laconic.paths.path import Message, Path, Said, Speech, Work
from laconic.paths.shared_choice import SharedChoice
from laconic.quantize import Carrier, Grid, Steps, round_up
from laconic.transport import Collectives, agree, agreement_bytes, ring_bytes

_ROUND, _ROUND_AGAIN = range(2)  # a worker's two streams of draws


@dataclass
class IntegerSum(Path):
    """The workers tell each other norms, scales where there are several, and codes; the sum of codes is a code."""

    transport: Collectives
    choice: SharedChoice
    grid: Grid
    carrier: Carrier

    @property
    def turns(self) -> Sequence[int]:
        """Norms, scales where there are several, codes, and in two stages their means."""
        return range(2 + (len(self.grid.level_counts) > 1) + (self.carrier.num_rows > 1))

    def bytes_out(self, layout: Layout) -> int:
        """What the workers agree on before counts too; two stages move as much as a ring."""
        num_workers = self.transport.num_workers
        count = self.choice.count(layout, num_workers)
        norms = agreement_bytes(self.grid.num_norms(count), 2, num_workers)
        scales = agreement_bytes(self.grid.num_map_words(count), 4, num_workers)
        return norms + scales + ring_bytes(self.carrier.num_bytes(count), num_workers)

    def speak(self, work: Work) -> Speech:
        with self.clock.time("select", work.device):
            values = self.choice.take_(work)
        steps = yield from self._agree(work, values)
        if steps is None:
            return None
        with self.clock.time("encode", work.device):
            key = key_of(self.grid.seed, _ROUND, self.transport.rank, work.step, work.number)
            words = self._encode(values, steps, key)
            sent = self._read(words, values.numel(), steps.step, steps) if self.choice.keeps else None
            words = self.on_wire(words)
        if self.carrier.num_rows == 1:
            yield partial(self.transport.all_reduce_, words, "codes")
        else:
            heard = yield partial(self.transport.all_to_all, words.view(self.transport.num_workers, -1), "codes")
            words = (yield partial(self.transport.all_gather, self._average(work, heard), "codes")).view(-1)
        with self.clock.time("decode", work.device):
            return Said((words.to(work.device, non_blocking=True), steps), sent)

    def apply_(self, work: Work, said: Said) -> None:
        assert work.taken is not None
        words, steps = said.heard
        step = steps.mean_step if self.carrier.num_rows == 1 else steps.step
        mean = self._read(words, work.taken.values.numel(), step, steps)
        self.choice.write_(work, mean if work.scale == 1 else mean.mul_(work.scale))

    def _agree(self, work: Work, values: Tensor) -> Generator[Message, Any, Steps | None]:
        """The grid that all workers share for these values, or None if one of them is not finite.

        Inf is the largest of all, so the MAX that finds the norm also tells everyone.
        """
        grid = self.grid
        count = values.numel()
        with self.clock.time("encode", work.device):
            largest = round_up(kernels.largest_magnitudes(values, grid.norm_group(count)))
            if not work.finite:
                largest.fill_(torch.inf)
        norms = (yield partial(agree, self.transport, largest, _maximum, "norms")).to(torch.float32)
        if not kernels.all_finite(norms):
            return None
        scales = None
        if len(grid.level_counts) > 1:
            scales = yield from self._agree_on_scales(work, values, norms)
        return grid.steps(norms, scales, count, self.transport.num_workers)

    def _agree_on_scales(self, work: Work, values: Tensor, norms: Tensor) -> Generator[Message, Any, Tensor]:
        """For each group the coarsest of the scales that the workers need: MIN, lane by lane of packed words."""
        grid = self.grid
        count = values.numel()
        bits = grid.map_bits
        with self.clock.time("encode", work.device):
            largest = kernels.largest_magnitudes(values, grid.scale_group(count))
            fitting = kernels.pack_lanes(grid.finest_fitting(largest, norms, count), bits)
        agreed = yield partial(agree, self.transport, fitting, partial(_minimum_of_lanes, bits), "scales")
        return kernels.unpack_lanes(agreed, largest.numel(), bits)

    def _encode(self, values: Tensor, steps: Steps, key: tuple[int, int]) -> Tensor:
        """This worker's codes, packed; the draws belong to (seed, rank, step, bucket, position)."""
        carrier = self.carrier
        return kernels.quantize_pack(
            values,
            steps.inverse,
            steps.group,
            self.grid.levels,
            carrier.lane_bits,
            carrier.num_words(values.numel()),
            carrier.dtype,
            key,
        )

    def _read(self, words: Tensor, count: int, step: Tensor, steps: Steps) -> Tensor:
        """What codes are worth."""
        return kernels.unpack_scale(words, count, self.carrier.lane_bits, step, steps.group)

    def _average(self, work: Work, heard: Tensor) -> Tensor:
        """The mean of everyone's words for this worker's share, rounded to codes again."""
        with self.clock.time("decode", work.device):
            key = key_of(self.grid.seed, _ROUND_AGAIN, self.transport.rank, work.step, work.number)
            there = heard.to(work.device, non_blocking=True)
            return self.on_wire(kernels.average_words(there, self.carrier.lane_bits, key))


def _maximum(rows: Tensor) -> Tensor:
    return rows.amax(0)


def _minimum_of_lanes(bits: int, rows: Tensor) -> Tensor:
    num_lanes = rows.shape[1] * 32 // bits
    lanes = torch.stack([kernels.unpack_lanes(row, num_lanes, bits) for row in rows])
    return kernels.pack_lanes(lanes.amin(0), bits)
