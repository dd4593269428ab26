"""Integers that add up: agree on a grid, round onto it, let the network add the codes, read the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels.draws import key_of
from laconic.quantize import Carrier, Grid, Steps, round_up
from laconic.session.stats import PhaseClock
from laconic.transport import Transport, agree

_ROUND, _ROUND_AGAIN = 0, 1  # a worker's two streams of draws


class IntegerSum:
    """What the workers say to each other about one vector: its norms, its scales where there are several, its codes."""

    def __init__(self, grid: Grid, carrier: Carrier, transport: Transport, clock: PhaseClock) -> None:
        self._grid, self._carrier, self._transport, self._clock = grid, carrier, transport, clock

    def agree(self, values: Tensor, *, finite: bool) -> Steps | None:
        """The grid that all workers share for these values, or None if one of them is not finite.

        Inf is the largest of all, so the MAX that finds the norm also tells everyone.
        """
        count, grid, device = values.numel(), self._grid, values.device
        with self._clock.time("encode", device):
            largest = round_up(kernels.largest_magnitudes(values, grid.norm_group(count)))
            if not finite:
                largest.fill_(torch.inf)
        with self._clock.time("exchange", device):
            norms = agree(self._transport, largest, lambda rows: rows.amax(0), "norms").to(torch.float32)
            if not kernels.all_finite(norms):
                return None
        scales = self._agree_on_scales(values, norms) if len(grid.level_counts) > 1 else None
        return grid.steps(norms, scales, count, self._transport.num_workers)

    def _agree_on_scales(self, values: Tensor, norms: Tensor) -> Tensor:
        """For each group the coarsest of the scales that the workers need: MIN, lane by lane of packed words."""
        grid, count, bits = self._grid, values.numel(), self._grid.map_bits
        with self._clock.time("encode", values.device):
            largest = kernels.largest_magnitudes(values, grid.scale_group(count))
            fitting = kernels.pack_lanes(grid.finest_fitting(largest, norms, count), bits)

        def coarsest(rows: Tensor) -> Tensor:
            num_lanes = rows.shape[1] * 32 // bits
            lanes = torch.stack([kernels.unpack_lanes(row, num_lanes, bits) for row in rows])
            return kernels.pack_lanes(lanes.amin(0), bits)

        with self._clock.time("exchange", values.device):
            agreed = agree(self._transport, fitting, coarsest, "scales")
        return kernels.unpack_lanes(agreed, largest.numel(), bits)

    def encode(self, values: Tensor, steps: Steps, step: int, bucket: int) -> Tensor:
        """This worker's codes, packed; the draws belong to (seed, rank, step, bucket, position)."""
        carrier, count = self._carrier, values.numel()
        key = key_of(self._grid.seed, _ROUND, self._transport.rank, step, bucket)
        return kernels.quantize_pack(
            values,
            steps.inverse,
            steps.group,
            self._grid.levels,
            carrier.lane_bits,
            carrier.num_words(count),
            carrier.dtype,
            key,
        )

    def add(self, words: Tensor, step: int, bucket: int) -> Tensor:
        """The sum of everyone's words; in two stages their mean, rounded to codes again by the one who added them."""
        transport = self._transport
        if self._carrier.num_rows == 1:
            transport.all_reduce_(words, "codes")
            return words
        heard = transport.all_to_all(words.view(transport.num_workers, -1), "codes")
        key = key_of(self._grid.seed, _ROUND_AGAIN, transport.rank, step, bucket)
        return transport.all_gather(kernels.average_words(heard, self._carrier.lane_bits, key), "codes").view(-1)

    def read_own(self, words: Tensor, count: int, steps: Steps) -> Tensor:
        """What this worker's codes say."""
        return kernels.unpack_scale(words, count, self._carrier.lane_bits, steps.step, steps.group)

    def read_mean(self, words: Tensor, count: int, steps: Steps) -> Tensor:
        """What `add` returned says of the mean over workers."""
        step = steps.mean_step if self._carrier.num_rows == 1 else steps.step
        return kernels.unpack_scale(words, count, self._carrier.lane_bits, step, steps.group)
