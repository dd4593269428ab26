"""The sum of several sparse frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.gpu.bits import set_bits, unpack_bits
from laconic.kernels.reference.sums import add_at_ as add_by_torch_


def sum_over_union_(
    total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor], *, take: bool
) -> tuple[Tensor, Tensor]:
    add_by_torch_(total, positions, values)
    places = unpack_bits(set_bits(torch.cat(list(positions)), total.numel()))
    sums = total.index_select(0, places)
    if take:
        total.index_fill_(0, places.to(torch.int64), 0)
    return places, sums
