"""join(ddp, optimizer, scheme): attach or follow, as the scheme asks, for trainers that wrap every model in DDP."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.attach.ddp import Attached, attach
from laconic.attach.follow import follow
from laconic.attach.unwrap import unwrapped
from laconic.gossip import Follower
from laconic.outer import OuterFollower
from laconic.recipes import parse
from laconic.scheme import AnyScheme, GossipScheme, OuterScheme

Following = Follower | OuterFollower
Joined = Attached | Following


def join(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheme: AnyScheme | str,
    before: Joined | None = None,
    **options: Any,
) -> Joined:
    """What attach() returns, or follow() of the model in `ddp`, which then exchanges nothing by itself.

    It goes on from what the same model kept `before` it was wrapped anew, and closes that.
    """
    joined = _join(ddp, optimizer, scheme, options)
    if before is not None:
        joined.load_state_dict(before.state_dict())
        before.close()
    return joined


def _join(ddp: nn.Module, optimizer: torch.optim.Optimizer, scheme: AnyScheme | str, options: dict[str, Any]) -> Joined:
    scheme = parse(scheme) if isinstance(scheme, str) and scheme != "auto" else scheme
    ddp = unwrapped(ddp)
    if not isinstance(scheme, GossipScheme | OuterScheme) or not isinstance(ddp, DistributedDataParallel):
        return attach(ddp, scheme, **options)
    options.pop("grad_scaler", None)  # what a model is, it is in unscaled units
    attach(ddp, "silent")
    ddp.broadcast_buffers = False
    return follow(ddp.module, optimizer, scheme, **options)
