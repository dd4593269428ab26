"""Vectors of the host by numpy, in the calling thread alone.

torch starts a team of OpenMP threads for each thread that calls it, and those spin for milliseconds afterwards: where
eight workers of two threads gossiped on 16 cores, an exchange took 12 ms instead of 7.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def end_to_end(rows: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """The rows as one, in `out` if given; where they are not on the host, by torch."""
    if rows[0].device.type != "cpu":
        return torch.cat(list(rows))
    joined = np.concatenate([row.numpy() for row in rows], out=None if out is None else out.numpy())
    return torch.from_numpy(joined) if out is None else out


def add_on_host(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """out = a + b; `out` may be one of them."""
    np.add(a.numpy(), b.numpy(), out=out.numpy())
    return out


def half_way(there: Tensor, here: Tensor) -> Tensor:
    """(there - here)/2."""
    way = np.subtract(there.numpy(), here.numpy())
    way *= np.float32(0.5)
    return torch.from_numpy(way)
