"""FSDP2's shards: each rank gets its share of the matrices whole, and gives every rank its shard of them back.

A DTensor brings its class, its mesh and its placements along, so that torch.distributed is not imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.layout import local


def placed(tensor: Any) -> Any:
    """Return where the shards of a DTensor lie; of another tensor, None."""
    return (tensor.device_mesh, tensor.placements) if hasattr(tensor, "placements") else None


def exchanged(stack: Tensor, like: Any, number: int, *, by_matrix: bool) -> Tensor:
    """Return a rank's share of `number` matrices, each whole, from its shard of each; or the other way round.

    Where `like`, one of these matrices, is no DTensor, the stack is returned as it is. Else it is one all-to-all.
    """
    if not placed(like):
        return stack
    within, across = (
        [type(place)(axis(place.dim)) if place.is_shard() else place for place in like.placements]
        for axis in (lambda dim: dim + 1, lambda dim: 0)
    )
    source, target = (within, across) if by_matrix else (across, within)
    shape = torch.Size((number, *like.shape))
    stride = torch.empty(shape, device="meta").stride()
    whole = type(like).from_local(stack, like.device_mesh, source, run_check=False, shape=shape, stride=stride)
    return local(whole.redistribute(placements=target))
