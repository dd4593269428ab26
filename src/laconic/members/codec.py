"""How one vector is written so that its reader needs nothing but the scheme: what a member and a server send."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError, SchemeError
from laconic.layout import Layout
from laconic.memory import Due
from laconic.paths import FramePlan
from laconic.quantize import Carrier, Exact, Grid, Quantizer, Steps, carrier_for, round_up
from laconic.scheme import Scheme
from laconic.select import Chooser
from laconic.wire import FrameShape, count_in

_NO_PEER = -1  # who sent a frame is known by its connection


class VectorCodec(Protocol):
    """float32 vectors of one layout <-> bytes; every vector is read as `encode` says that it was sent, bit for bit."""

    def encode(self, values: Tensor, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(bytes on the CPU, the vector that they stand for); `key` names the draws of a rounding without bias."""

    def encode_all(self, values: Tensor, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The same without a selection: every entry that is not zero goes."""

    def decode(self, payload: Tensor, device: torch.device) -> Tensor:
        """The vector that was sent; FrameError where the bytes are none."""


def codec_for(scheme: Scheme, layout: Layout) -> VectorCodec:
    """The codec of a scheme of drifts for one fragment.

    Raises:
        SchemeError: The scheme's messages mean nothing to a reader that has no drift of its own.
    """
    select, quantize = scheme.select, scheme.quantize
    if select.is_shared and not select.sends_all:
        raise SchemeError(f"members share no random draws, which {scheme} needs; use one like streaming")
    if not isinstance(quantize, Grid):
        return FrameCodec(None if select.sends_all else cast(Chooser, select), quantize, layout)
    if len(quantize.level_counts) > 1:
        raise SchemeError("members agree on no scales; use MaxNorm(block=512)")
    return GridCodec(quantize, layout)


class GridCodec:
    """Integer codes on a grid whose norms go before them."""

    def __init__(self, grid: Grid, layout: Layout) -> None:
        self._grid = grid
        self._count = layout.num_entries
        self._carrier: Carrier = carrier_for(grid.levels, 1, stages=1)
        self._norm_bytes = -(-2 * grid.num_norms(self._count) // 8) * 8  # so that words of any type may follow
        self._num_bytes = self._norm_bytes + self._carrier.num_bytes(self._count)

    def encode(self, values: Tensor, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        norms = round_up(kernels.largest_magnitudes(values, self._grid.norm_group(self._count)))
        steps = self._steps(norms)
        carrier = self._carrier
        words = kernels.quantize_pack(
            values,
            steps.inverse,
            steps.group,
            self._grid.levels,
            carrier.lane_bits,
            carrier.num_words(self._count),
            carrier.dtype,
            kernels.key_of(self._grid.seed, *key),
        )
        payload = torch.zeros(self._num_bytes, dtype=torch.uint8)
        payload[: 2 * norms.numel()] = norms.view(torch.uint8).cpu()
        payload[self._norm_bytes :] = words.view(torch.uint8).cpu()
        return payload, self._read(words, steps)

    encode_all = encode

    def decode(self, payload: Tensor, device: torch.device) -> Tensor:
        if payload.numel() != self._num_bytes:
            raise FrameError(f"sent {payload.numel()} bytes of codes, not {self._num_bytes}")
        norms = payload[: 2 * self._grid.num_norms(self._count)].view(torch.bfloat16).to(device)
        if not kernels.all_finite(norms.to(torch.float32)):
            raise FrameError("sent norms that are not finite")
        words = payload[self._norm_bytes :].view(self._carrier.dtype).to(device)
        return self._read(words, self._steps(norms))

    def _steps(self, norms: Tensor) -> Steps:
        return self._grid.steps(norms.to(torch.float32), None, self._count, 1)

    def _read(self, words: Tensor, steps: Steps) -> Tensor:
        return kernels.unpack_scale(words, self._count, self._carrier.lane_bits, steps.step, steps.group)


class FrameCodec:
    """Frames of selected entries, or of all."""

    def __init__(self, select: Chooser | None, quantize: Quantizer, layout: Layout) -> None:
        self._select = select
        self._quantize = quantize
        self._layout = layout
        self._plans: dict[torch.device, FramePlan] = {}

    def encode(self, values: Tensor, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if self._select is None or not values.numel():
            return self.encode_all(values, key)
        plan = self._plan(values.device)
        selected, sent_values = plan.withdraw_(values.clone(), Due(None, 1.0))
        positions = plan.positions(selected)
        if positions is None:
            return self.encode_all(values, key)
        sent = torch.zeros_like(values)
        sent[positions] = sent_values
        return self.encode_all(sent, key)

    def encode_all(self, values: Tensor, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        positions = values.nonzero().view(-1).to(torch.int32)
        is_dense = not 0 < 2 * positions.numel() <= values.numel()
        shape = self._shape(0 if is_dense else positions.numel())
        codes, scale = self._quantize.encode(values if is_dense else values[positions.long()])
        frame = shape.write(positions[:0] if is_dense else positions, codes, scale, step=0, bucket=0)
        decoded = self._quantize.decode(codes, scale)[: shape.num_fixed + shape.k]
        sent = decoded if is_dense else torch.zeros_like(values).index_copy_(0, positions.long(), decoded)
        return frame.cpu(), sent

    def decode(self, payload: Tensor, device: torch.device) -> Tensor:
        count = count_in(payload)
        if not 0 <= count <= self._layout.num_entries:
            raise FrameError(f"sent a frame of {count} entries, of {self._layout.num_entries}")
        shape = self._shape(count)
        contents = shape.read(payload, step=0, bucket=0, peer=_NO_PEER)
        values = contents.values.to(device)
        if shape.num_fixed:
            return values
        positions = contents.positions.to(device).long()
        return torch.zeros(self._layout.num_entries, device=device).index_copy_(0, positions, values)

    def _plan(self, device: torch.device) -> FramePlan:
        assert self._select is not None
        if device not in self._plans:
            density = self._select.density_among(1)
            self._plans[device] = FramePlan(self._select, self._quantize, self._layout, density, device)
        return self._plans[device]

    def _shape(self, num_selected: int) -> FrameShape:
        """That of so many selected entries; of none, every entry goes in order."""
        num_entries = self._layout.num_entries
        return FrameShape(num_entries, num_selected, 0 if num_selected else num_entries, self._quantize)


def exact_codec(layout: Layout) -> VectorCodec:
    """The codec of what goes as it is: buffers of norms."""
    return FrameCodec(None, Exact(), layout)
