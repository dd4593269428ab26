"""Accelerate: attach(accelerator, model, scheme), after accelerator.prepare()."""

from typing import Any, Protocol

from torch import nn

from laconic import api
from laconic.adapters import GradScaler
from laconic.scheme import AnyScheme
from laconic.session import Attached, RankZeroState


class Accelerator(Protocol):
    """What is asked of an accelerate.Accelerator, which takes handlers of its own classes alone, and none derived."""

    scaler: GradScaler | None

    def register_for_checkpointing(self, *objects: Any) -> None: ...


def attach(accelerator: Accelerator, model: nn.Module, scheme: AnyScheme | str, **options: Any) -> Attached:
    """As laconic.attach, to a model that prepare() returned; save_state() and load_state() keep every rank's state."""
    session = api.attach(model, scheme, grad_scaler=accelerator.scaler, **options)
    accelerator.register_for_checkpointing(RankZeroState(session))
    return session
