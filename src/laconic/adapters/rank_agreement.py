"""Ranks have the same model, scheme and release before they exchange anything."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import StateError
from laconic.layout import local, plain_name
from laconic.scheme import AnyScheme
from laconic.transport import Group, ProcessGroup, check_alike, release, values_differ


def check_common(
    model: nn.Module | Mapping[str, Tensor], scheme: AnyScheme | str, group: ProcessGroup, device: torch.device
) -> None:
    """SchemeError, on all ranks, unless all run one release and scheme, and train a model of one layout and types."""
    named = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    tensors = [(plain_name(name), tensor) for name, tensor in named.items() if isinstance(tensor, Tensor)]
    layout = [
        f"{name}: {tensor.dtype} of {tuple(tensor.shape)}{' that is trained' if tensor.requires_grad else ''}"
        for name, tensor in tensors
    ]
    check_alike(group, device, [release(), f"the scheme {scheme}", *layout])


def check_names(states: Sequence[Mapping[str, Any]], known: Collection[str]) -> None:
    """StateError unless all that these states keep belongs to parameters of these names."""
    names = {name for state in states for kept in state.get("memory", {}).values() for name in kept}
    strange = sorted(names - set(known))
    if strange:
        raise StateError(f"the state holds {strange[0]!r}, which the model does not; load the state of the same model")


def tensors_of(model: nn.Module) -> list[Tensor]:
    """The parts of a model's parameters and buffers on this rank."""
    here = [local(tensor) for tensor in (*model.parameters(), *model.buffers())]
    return [tensor for tensor in here if tensor.numel()]


@torch.no_grad()
def begin_alike_(model: nn.Module, group: ProcessGroup, meeting: Group, device: torch.device) -> None:
    """Overwrite every parameter and buffer with those of the first rank, unless all ranks of the group have them."""
    tensors = tensors_of(model)
    if not values_differ(group, device, tensors):  # those of one seed do not, and slow links are spared
        return
    with meeting.traffic.uncounted():
        for tensor in tensors:
            whole = tensor.to(device).contiguous()
            frame = whole.view(-1).view(torch.uint8)  # of whatever type
            frame.copy_(meeting.broadcast(frame if meeting.rank == 0 else None, 0, frame.numel()))
            tensor.copy_(whole)
