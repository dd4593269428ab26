"""The passes over a matrix that are left of an optimizer's step once its matrix products are batched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.kernels.contract import kernel


@kernel
def stack_momentum_(momenta: Sequence[Tensor], gradients: Sequence[Tensor], stack: Tensor, momentum: float) -> None:
    """m += (1 - momentum) * (g - m); stack = g + momentum / (1 - momentum) * m, rounded to the stack's type."""
    gradients = [g.to(m.dtype) for g, m in zip(gradients, momenta, strict=True)]
    torch._foreach_lerp_(list(momenta), gradients, 1 - momentum)
    for g, m, row in zip(gradients, momenta, stack.unbind(), strict=True):
        torch.add(g, m, alpha=momentum / (1 - momentum), out=row)


@kernel
def add_decayed_(params: Sequence[Tensor], updates: Tensor, kept: float) -> None:
    """p = kept * p + update, for a stack of updates, in float32 whatever the types."""
    for p, update in zip(params, updates.unbind(), strict=True):
        torch.add(update, p, alpha=kept, out=p)
