"""What frameworks wrap around a module, taken off by the names of their fields: nothing of theirs is imported."""

from torch import nn

_WRAPPED = ("_orig_mod", "_forward_module")  # by torch.compile; by Fabric


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside what torch.compile, Accelerate and Fabric hand out; anything else as it is."""
    for name in _WRAPPED:
        inside = vars(module).get("_modules", {}).get(name)
        if isinstance(inside, nn.Module):
            return unwrapped(inside)
    return module
