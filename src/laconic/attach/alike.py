"""What all ranks must have in common before they exchange anything."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from laconic.layout import plain_name
from laconic.scheme import AnyScheme
from laconic.transport import ProcessGroup, check_alike, release


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
