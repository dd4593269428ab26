"""Sums that the network makes: floats, or integers on a grid that the workers agree on, out of accounts.

And gradients that go as they are, to be added or to one other worker: of those nothing is kept.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.exchange import matching
from laconic.kernels import key_of
from laconic.layout import Layout, positions_of
from laconic.paths.path import Message, Messages, Path, Withdrawn, Work
from laconic.quantize import Carrier, FloatCode, Grid, Quantizer, Steps, round_up
from laconic.select import BucketPlan, SharedSelector
from laconic.transport import Collectives, agree, agreement_bytes, ring_bytes

_FP16_TOP = 2.0**15  # half of its range: each addition in flight may round up
_ROUND, _ROUND_AGAIN = range(2)  # a worker's two streams of draws


class SharedSelection:
    """What all workers send alike: every entry, or this step's draw of positions that they share."""

    def __init__(self, select: SharedSelector, *, keeps: bool) -> None:
        self._select = select
        self.keeps = keeps  # whether what is not sent is kept; where it is not, a gain makes the mean true
        self._plans: dict[tuple[Layout, float], tuple[BucketPlan, Tensor]] = {}

    def count(self, layout: Layout, num_workers: int) -> int:
        """The entries of a bucket that go among M workers once the trigger has reached its target."""
        plan = self._select.plan(layout, self._select.density_among(num_workers))
        return plan.num_fixed + plan.k

    def withdraw_(self, work: Work) -> Tensor:
        """Deposit the gradient and take out what is sent; NaN for all of it, and no deposit, if it is not finite."""
        plan, fixed = self._plan(work)
        if not work.finite:
            return torch.full((plan.num_fixed + plan.k,), torch.nan, dtype=torch.float32, device=work.device)
        positions = None
        if plan.k:
            drawn = self._select.positions(plan, work.step, work.number, work.device)
            positions = torch.cat([fixed, drawn])
        work.account.deposit_(work.flat, 1 / work.scale)
        work.withdrawn = Withdrawn(positions, plan.num_fixed, work.account.withdraw_(positions))
        return work.withdrawn.values

    def write_(self, work: Work, mean: Tensor) -> None:
        """Overwrite the bucket with the mean where something was sent, and with zeros elsewhere."""
        out = work.withdrawn  # None on a worker that was late for a dense step, and whose gradient is not finite
        positions = out.positions if out is not None else None
        if positions is None:
            work.flat.copy_(mean)
            return
        plan, _ = self._plan(work)
        if not self.keeps:
            mean[plan.num_fixed :].mul_((plan.num_entries - plan.num_fixed) / plan.k)
        work.flat.zero_()
        work.flat[positions] = mean.to(work.flat.dtype)

    def _plan(self, work: Work) -> tuple[BucketPlan, Tensor]:
        key = work.layout, work.density
        if key not in self._plans:
            plan = self._select.plan(*key)
            fixed = positions_of(plan.fixed if plan.k else (), work.device)
            self._plans[key] = plan, fixed
        return self._plans[key]


@dataclass
class FloatSum(Path):
    """Deposit, withdraw what all workers send, round v/M to the code's type, and let the network add.

    It also is the dense step of every other scheme, in the gradient's own type. What a 16-bit sum rounds away in flight
    is nobody's to keep.
    """

    selection: SharedSelection
    quantize: FloatCode

    def bytes_out(self, layout: Layout) -> int:
        num_workers = self.transport.num_workers
        return ring_bytes(self.quantize.num_bytes(self.selection.count(layout, num_workers)), num_workers)

    def exchange(self, work: Work) -> Messages:
        num_workers = self.transport.num_workers
        with self.clock.time("select", work.device):
            values = self.selection.withdraw_(work)
        with self.clock.time("encode", work.device):
            dtype = self.quantize.sum_dtype(work.flat.dtype)
            is_rounded = dtype != torch.float32 and self.selection.keeps
            if is_rounded and dtype == torch.float16:  # what is beyond its range is owed, and no sum is Inf for ever
                values = values.clamp(-_FP16_TOP, _FP16_TOP)
            codes = values.div(num_workers).to(dtype)
            if is_rounded:
                work.note_sent(codes.to(torch.float32).mul_(num_workers))
            codes = self.on_wire(codes)
        yield partial(self.transport.sum_gradients_, codes, "dense")
        with self.clock.time("decode", work.device):
            codes = codes.to(work.device, non_blocking=True)
            return codes if kernels.all_finite(codes) else None

    def apply_(self, work: Work, received: Tensor) -> None:
        self.selection.write_(work, received if work.scale == 1 else received * work.scale)


@dataclass
class IntegerSum(Path):
    """Agree on a grid, round onto it, let the network add the codes, read the mean: the sum of codes is a code."""

    transport: Collectives
    selection: SharedSelection
    grid: Grid
    carrier: Carrier

    @property
    def message_offsets(self) -> Sequence[int]:
        """Norms, scales where there are several, codes, and in two stages their means."""
        return range(2 + (len(self.grid.level_counts) > 1) + (self.carrier.num_rows > 1))

    def bytes_out(self, layout: Layout) -> int:
        """What the workers agree on before counts too; two stages move as much as a ring."""
        num_workers = self.transport.num_workers
        count = self.selection.count(layout, num_workers)
        norms = agreement_bytes(self.grid.num_norms(count), 2, num_workers)
        scales = agreement_bytes(self.grid.num_map_words(count), 4, num_workers)
        return norms + scales + ring_bytes(self.carrier.num_bytes(count), num_workers)

    def exchange(self, work: Work) -> Messages:
        with self.clock.time("select", work.device):
            values = self.selection.withdraw_(work)
        steps = yield from self._agree(work, values)
        if steps is None:
            return None
        with self.clock.time("encode", work.device):
            key = key_of(self.grid.seed, _ROUND, self.transport.rank, work.step, work.number)
            words = kernels.quantize_pack(
                *(values, steps.inverse, steps.group, self.grid.levels, self.carrier.lane_bits),
                *(self.carrier.num_words(values.numel()), self.carrier.dtype, key),
            )
            if self.selection.keeps:
                work.note_sent(self._read(words, values.numel(), steps.step, steps))
            words = self.on_wire(words)
        if self.carrier.num_rows == 1:
            yield partial(self.transport.all_reduce_, words, "codes")
        else:
            rows = yield partial(self.transport.all_to_all, words.view(self.transport.num_workers, -1), "codes")
            words = (yield partial(self.transport.all_gather, self._average(work, rows), "codes")).view(-1)
        with self.clock.time("decode", work.device):
            return words.to(work.device, non_blocking=True), steps

    def apply_(self, work: Work, received: tuple[Tensor, Steps]) -> None:
        assert work.withdrawn is not None
        words, steps = received
        step = steps.mean_step if self.carrier.num_rows == 1 else steps.step
        mean = self._read(words, work.withdrawn.values.numel(), step, steps)
        self.selection.write_(work, mean if work.scale == 1 else mean.mul_(work.scale))

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
        norms = (yield partial(agree, self.transport, largest, partial(torch.amax, dim=0), "norms")).to(torch.float32)
        if not kernels.all_finite(norms):
            return None
        scales = None
        if len(grid.level_counts) > 1:
            scales = yield from self._agree_on_scales(work, values, norms)
        return grid.steps(norms, scales, count, self.transport.num_workers)

    def _agree_on_scales(self, work: Work, values: Tensor, norms: Tensor) -> Generator[Message, Any, Tensor]:
        """For each group the coarsest of the scales that the workers need: MIN, lane by lane of packed words."""
        count = values.numel()
        bits = self.grid.map_bits
        with self.clock.time("encode", work.device):
            largest = kernels.largest_magnitudes(values, self.grid.scale_group(count))
            fitting = kernels.pack_lanes(self.grid.finest_fitting(largest, norms, count), bits)
        agreed = yield partial(agree, self.transport, fitting, partial(_minimum_of_lanes, bits), "scales")
        return kernels.unpack_lanes(agreed, largest.numel(), bits)

    def _read(self, words: Tensor, count: int, step: Tensor, steps: Steps) -> Tensor:
        return kernels.unpack_scale(words, count, self.carrier.lane_bits, step, steps.group)

    def _average(self, work: Work, rows: Tensor) -> Tensor:
        """The mean of everyone's words for this worker's share, rounded to codes again."""
        with self.clock.time("decode", work.device):
            key = key_of(self.grid.seed, _ROUND_AGAIN, self.transport.rank, work.step, work.number)
            rows = rows.to(work.device, non_blocking=True)
            return self.on_wire(kernels.average_words(rows, self.carrier.lane_bits, key))


def _minimum_of_lanes(bits: int, rows: Tensor) -> Tensor:
    num_lanes = rows.shape[1] * 32 // bits
    lanes = torch.stack([kernels.unpack_lanes(row, num_lanes, bits) for row in rows])
    return kernels.pack_lanes(lanes.amin(0), bits)


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
