"""Vectors end to end, and sums of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.registry import kernel


@kernel
def join_(out: Tensor, pieces: Sequence[Tensor], addend: Tensor | None = None) -> None:
    """out = the pieces end to end, plus `addend` if given; all float32. A piece may lie where it goes.

    One piece and an addend make a sum of two vectors: join_(out, [a], b).
    """
    torch._foreach_copy_(list(torch.split(out, [piece.numel() for piece in pieces])), list(pieces))
    if addend is not None:
        out.add_(addend)
