"""The optimizers of a model that trains apart: what exchanges ask of them, and whether the exchanges are called."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

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
        optimizers: Those of the model.
        call: What is to be called after each of their steps; `stop()` says that it was.
    """

    def __init__(self, optimizers: Optimizers, call: str) -> None:
        self._call = call
        self._num_steps = 0
        self._hooks = []
        for optimizer in listed(optimizers):
            with suppress(AttributeError):  # of a trainer's wrapper around one, which takes no hooks
                self._hooks.append(optimizer.register_step_post_hook(self._note_step))

    def stop(self) -> None:
        """Take the hooks off, between two steps."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note_step(self, *_: Any) -> None:
        self._num_steps += 1
        if self._num_steps == _MOST_UNCALLED:
            _LOG.warning(
                "the optimizer has made %d steps and nothing was exchanged; call %s after each of them",
                self._num_steps,
                self._call,
            )
