"""What users of Accelerate, Lightning, torchft and Transformers import: one file each.

Below is what those share: attach or follow, as the scheme asks, for trainers that wrap every model in DDP.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.adapters import follow_others, unwrapped
from laconic.api import attach
from laconic.errors import check_timeout
from laconic.recipes import parse
from laconic.replicas import Follower
from laconic.scheme import AnyScheme
from laconic.session import Attached

Either = Attached | Follower


def attach_or_follow(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheme: AnyScheme | str,
    before: Either | None = None,
    **options: Any,
) -> Either:
    """What attach() returns, or follow() of the model in `ddp`, which then exchanges nothing by itself.

    It goes on from what the same model kept `before` it was wrapped anew, and closes that.
    """
    either = _either(ddp, optimizer, scheme, options)
    if before is not None:
        either.load_state_dict(before.state_dict())
        before.close()
    return either


def _either(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, scheme: AnyScheme | str, options: dict[str, Any]
) -> Either:
    check_timeout(options.get("timeout_s"))
    scheme = scheme if scheme == "auto" else parse(scheme)
    ddp = unwrapped(ddp)
    if isinstance(scheme, str) or scheme.of_what == "gradients" or not isinstance(ddp, DistributedDataParallel):
        return attach(ddp, scheme, **options)
    options.pop("grad_scaler", None)  # what a model is, it is in unscaled units
    attach(ddp, "silent")
    ddp.broadcast_buffers = False
    return follow_others(ddp.module, optimizer, scheme, **options)
