"""FSDP2's shards: each rank gets its share of the matrices whole, and gives every rank its shard of them back.

A DTensor brings its class, its mesh and its placements along, so that torch.distributed is not imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def placed(tensor: Any) -> Any:
    """Return where the shards of a DTensor lie; of another tensor, None."""
    return (tensor.device_mesh, tensor.placements) if hasattr(tensor, "placements") else None


def local(tensor: Any) -> Tensor:
    """Return what of a tensor lies on this rank: a DTensor's shard, and else all of it."""
    shard: Tensor = tensor.to_local() if placed(tensor) else tensor
    return shard


def by_matrix(stack: Tensor, like: Any) -> Tensor:
    """Return this rank's share of the matrices, whole, from its shard of each: one all-to-all."""
    return _cut_anew(stack, like, len(stack), 1, 0) if placed(like) else stack


def by_shard(stack: Tensor, like: Any, number: int) -> Tensor:
    """Return this rank's shard of each of `number` matrices, from its share of them."""
    return _cut_anew(stack, like, number, 0, 1) if placed(like) else stack


def _cut_anew(stack: Tensor, like: Any, number: int, source: int, target: int) -> Tensor:
    """Return a stack that is cut by matrix (0) or as its matrices are (1), cut the other way."""
    cuts = [
        [type(place)(is_within * (place.dim + 1)) if place.is_shard() else place for place in like.placements]
        for is_within in (0, 1)
    ]
    shape = torch.Size((number, *like.shape))
    stride = torch.empty(shape, device="meta").stride()
    whole = type(like).from_local(stack, like.device_mesh, cuts[source], run_check=False, shape=shape, stride=stride)
    result: Tensor = whole.redistribute(placements=cuts[target]).to_local()
    return result
