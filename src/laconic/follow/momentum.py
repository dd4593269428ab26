"""The optimizer's momentum, which otherwise would go on as if no peer had moved the model."""

from __future__ import annotations

import torch
from torch import Tensor


class Momentum:
    """v -= (1 - mu) * way/lr, where SGD does v = mu*v + gradient, x -= lr*v, and an exchange x += way.

    So what peers do to a model counts as steps that it made, and two momenta draw near to each other as the models do,
    without a byte (after quasi-global momentum, Lin et al., ICML 2021). Ways are opposites, so the sum of both momenta
    is unchanged where the learning rates are the same. An optimizer other than SGD keeps its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def heed_(self, moved: list[tuple[Tensor, Tensor]]) -> None:
        """Overwrite the momenta of parameters that were moved: (parameter or buffer, way) of each."""
        if not isinstance(self._optimizer, torch.optim.SGD):
            return
        ways = {id(tensor): way for tensor, way in moved}
        for group in self._optimizer.param_groups:
            lr = float(group["lr"])
            if not lr or not group["momentum"]:
                continue
            for parameter in group["params"]:
                velocity = self._optimizer.state[parameter].get("momentum_buffer") if id(parameter) in ways else None
                if velocity is not None:
                    velocity.add_(ways[id(parameter)], alpha=(group["momentum"] - 1) / lr)
