"""The optimizer's momentum under gossip, which otherwise would go on as if no peer had moved the model."""

import torch
from torch import Tensor

_LEAST_LR_SHARE = 0.01  # of the largest so far: below, update/lr says more of where a model was than will be


class QuasiGlobalMomentum:
    """v -= (1 - mu^g)/g * update/lr, where SGD does v = mu*v + gradient, x -= lr*v, and after g steps x += update.

    So what peers do to a model counts as steps that it made, and two momenta draw near to each other as the models do,
    without a byte (at g = 1 quasi-global momentum, Lin et al., ICML 2021; the share for more steps is ours: by itself
    (1 - mu) would carry rare exchanges on to the other's place). Updates are opposites, so the sum of both momenta is
    unchanged where rates and gaps are the same. An optimizer other than SGD keeps its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @torch.no_grad()
    def follow_(self, moved: list[tuple[Tensor, Tensor]], gap: int, lr_share: float) -> None:
        """Overwrite the momenta of parameters that were moved: (parameter or buffer, update) of each.

        `gap` is how many steps the updates are about, `lr_share` the learning rate over the largest so far.
        """
        if not isinstance(self._optimizer, torch.optim.SGD) or lr_share < _LEAST_LR_SHARE:
            return
        updates = {id(tensor): update for tensor, update in moved}
        for group in self._optimizer.param_groups:
            lr = float(group["lr"])
            mu = group["momentum"]
            velocities: list[Tensor] = []
            followed: list[Tensor] = []
            for parameter in group["params"] if lr and mu else []:
                velocity = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
                if velocity is not None and not velocity.is_sparse and id(parameter) in updates:
                    velocities.append(velocity)
                    followed.append(updates[id(parameter)].view(velocity.shape))
            if velocities:
                torch._foreach_add_(velocities, followed, alpha=(mu**gap - 1) / (gap * lr))
