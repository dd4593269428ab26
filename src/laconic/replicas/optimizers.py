"""The optimizers of a model that trains apart: what exchanges ask of them, and whether the exchanges are called."""

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from laconic.layout import local

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_LOG = logging.getLogger("laconic.replicas")
_MOST_UNCALLED = 20  # steps of an optimizer: some scripts train a little before they begin to exchange


def listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers of a model, which may be one for its matrices and one for the rest."""
    return list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]  # type: ignore[list-item]


def drop_nonfinite_moments_(optimizers: Optimizers) -> None:
    """Let optimizers begin anew with the parameters of which they keep something that is not finite."""
    for state in (optimizer.state for optimizer in listed(optimizers)):
        for parameter, moments in list(state.items()):
            tensors = [value for value in moments.values() if isinstance(value, Tensor)]
            if not all(bool(local(tensor).isfinite().all()) for tensor in tensors):
                del state[parameter]


def inner_momentum(optimizers: Optimizers) -> float:
    """The largest momentum of the optimizers' groups: that of SGD and Muon, or Adam's first beta."""
    of_groups = []
    for group in (group for optimizer in listed(optimizers) for group in optimizer.param_groups):
        has_betas = "betas" in group and not group.get("use_muon", False)
        of_groups.append(float(group["betas"][0] if has_betas else group.get("momentum", 0.0)))
    return max(of_groups)


class StepReminder:
    """Logs once that optimizers step a model and nothing exchanges it: each rank would train alone, in silence.

    Args:
        parameters: Those of the model.
        call: What is to be called after each of the optimizer's steps; `stop()` says that it was.
    """

    def __init__(self, parameters: Iterable[Tensor], call: str) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._call = call
        self._num_steps = 0
        self._hook = register_optimizer_step_post_hook(_OnStep(weakref.ref(self)))

    def stop(self) -> None:
        """Take the hook off."""
        self._hook.remove()

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._num_steps += any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"][:1])
        if self._num_steps == _MOST_UNCALLED:
            self.stop()
            _LOG.warning(
                "the optimizer has made %d steps and nothing was exchanged; call %s after each of them",
                self._num_steps,
                self._call,
            )


class _OnStep:
    """A hook that holds its reminder weakly: optimizers outlive followers."""

    def __init__(self, reminder: "weakref.ref[StepReminder]") -> None:
        self._reminder = reminder

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if (reminder := self._reminder()) is not None:
            reminder.note_step(optimizer)
