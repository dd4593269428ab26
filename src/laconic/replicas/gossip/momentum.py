"""The optimizer's momentum, which otherwise would go on as if no peer had moved the model."""

import torch
from torch import Tensor

_LEAST_LR_SHARE = 0.01  # of the largest so far: below, way/lr says more of where a model was than of where it is going


class Momentum:
    """It stays this worker's own."""

    def heed_(self, moved: list[tuple[Tensor, Tensor]], gap: int, lr_share: float) -> None:
        """Overwrite the momenta of parameters that were moved, here none: (parameter or buffer, way) of each.

        `gap` is how many steps the ways are about, `lr_share` the learning rate over the largest so far.
        """


class QuasiGlobalMomentum(Momentum):
    """v -= (1 - mu^g)/g * way/lr, where SGD does v = mu*v + gradient, x -= lr*v, and after g steps x += way.

    So what peers do to a model counts as steps that it made, and two momenta draw near to each other as the models do,
    without a byte (at g = 1 quasi-global momentum, Lin et al., ICML 2021; the share for more steps is ours: by itself
    (1 - mu) would carry rare exchanges on to the other's place). Ways are opposites, so the sum of both momenta is
    unchanged where rates and gaps are the same. An optimizer other than SGD keeps its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def heed_(self, moved: list[tuple[Tensor, Tensor]], gap: int, lr_share: float) -> None:
        if not isinstance(self._optimizer, torch.optim.SGD) or lr_share < _LEAST_LR_SHARE:
            return
        ways = {id(tensor): way for tensor, way in moved}
        for group in self._optimizer.param_groups:
            lr = float(group["lr"])
            mu = group["momentum"]
            heeding: list[Tensor] = []
            heard: list[Tensor] = []
            for parameter in group["params"] if lr and mu else []:
                velocity = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
                if velocity is not None and not velocity.is_sparse and id(parameter) in ways:
                    heeding.append(velocity)
                    heard.append(ways[id(parameter)].view(velocity.shape))
            if heeding:
                torch._foreach_add_(heeding, heard, alpha=(mu**gap - 1) / (gap * lr))
