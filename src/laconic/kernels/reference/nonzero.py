"""Where a vector is not zero."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def has_zeros(x: Tensor) -> bool:
    """Whether any entry of a vector is zero."""
    if x.device.type == "cpu":
        return bool(np.count_nonzero(x.numpy()) < x.numel())
    return not x.all()


def nonzero(x: Tensor) -> Tensor:
    """Positions of the entries of a vector that are not zero, ascending, int64."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(x.numpy()))  # 0.7 ms for 1.2 M booleans; torch.nonzero takes 7
    return x.nonzero().squeeze(1)
