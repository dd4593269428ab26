"""What all ranks must have in common before they exchange anything."""

import torch
from torch import Tensor, nn

from laconic.layout import plain_name
from laconic.scheme import AnyScheme
from laconic.transport import ProcessGroup, check_alike, release


def check_common(model: nn.Module, scheme: AnyScheme | str, group: ProcessGroup, device: torch.device) -> None:
    """SchemeError, on all ranks, unless all run one release and scheme, and train a model of one layout and types."""
    tensors = [(plain_name(name), t) for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)]
    layout = [
        f"{name}: {tensor.dtype} of {tuple(tensor.shape)}{' that is trained' if tensor.requires_grad else ''}"
        for name, tensor in tensors
    ]
    check_alike(group, device, [release(), f"the scheme {scheme}", *layout])
