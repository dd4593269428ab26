"""attach(ddp, scheme) and follow(model, optimizer, scheme): the one line that a training script adds."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from laconic.adapters import (
    GradScaler,
    attach_to_ddp,
    attach_to_shards,
    check_options,
    follow_others,
    of_gradients,
    unwrapped,
)
from laconic.errors import SchemeError, check_timeout
from laconic.planning import AutoFollower, AutoSession, check_auto
from laconic.recipes import parse
from laconic.replicas import Follower, MakeOptimizer, Optimizers
from laconic.scheme import AnyScheme
from laconic.session import Attached, OnMismatch, check_on_mismatch
from laconic.transport import ProcessGroup, world


def attach(
    ddp: nn.Module,
    scheme: AnyScheme | str,
    *,
    group: ProcessGroup | None = None,
    grad_scaler: GradScaler | None = None,
    servers: Sequence[int] = (),
    timeout_s: float | None = None,
    pipeline: bool | None = None,
    on_nonfinite: Literal["nan", "zero"] = "nan",
    on_mismatch: OnMismatch = "warn",
    check_replicas_every: int = 100,
    unused_steps: Literal["warn", "discard", "ignore"] = "warn",
) -> Attached:
    """Let `ddp` exchange its gradients under `scheme`; all its ranks make this call, before the first backward pass.

    Args:
        ddp: A DistributedDataParallel, also inside what torch.compile, Accelerate or Fabric make of one; or a model
            under fully_shard(), each of whose shards meets its replicas inside the backward pass, which waits.
        scheme: A text like "topk:rho=0.01", a recipe's result or a Scheme. Under "auto" the first steps run in bf16,
            and the others under what a plan on those picks.
        group: For fully_shard() alone: this rank and those that hold replicas of its shard.
        grad_scaler: The GradScaler that scales the loss, if one does; residuals then stay in unscaled units.
        servers: Ranks that call serve() meanwhile, and are not among ddp's; without any, the workers add up themselves.
        timeout_s: After which a peer that sends nothing is lost: a minute with servers, else the group's own timeout.
        pipeline: Whether buckets overlap. The numbers are the same; large models take less time and small ones more,
            so it is on for large ones unless given.
        on_nonfinite: "nan" leaves a bucket with Inf or NaN of some worker NaN on all ranks; "zero" makes it zero, and
            ten such steps in a row an error.
        on_mismatch: What to do where the ranks' parameters differ: "warn", "error", or "heal", which takes over what
            most ranks have.
        check_replicas_every: Steps between two such comparisons, of eight bytes each; 0: never.
        unused_steps: What to do where gradients are cleared that no optimizer used, while the scheme keeps a part of
            them to send it later: "warn" once, "ignore", or "discard", which takes such a step back exactly. That
            costs a copy of all that is kept to the host's memory at each step, and a short message among the ranks.

    Returns:
        A session: stats(), state_dict(), load_state_dict(), close(), and with "discard" discard_().

    Raises:
        SchemeError: The scheme, the model and the options do not fit, or differ between ranks.

    Example:
        >>> session = laconic.attach(DistributedDataParallel(model), "topk:rho=0.01")
    """
    check_timeout(timeout_s)
    is_auto = scheme == "auto"
    ddp = unwrapped(ddp)
    scheme = of_gradients("bf16" if is_auto else scheme)
    check_options(scheme, grad_scaler, on_nonfinite, on_mismatch, unused_steps)
    looks: dict[str, Any] = {
        "grad_scaler": grad_scaler,
        "on_nonfinite": on_nonfinite,
        "on_mismatch": on_mismatch,
        "check_replicas_every": check_replicas_every,
        "unused_steps": unused_steps,
    }
    if hasattr(ddp, "set_all_reduce_hook"):
        if is_auto:
            raise SchemeError("auto does not choose for FSDP2 yet; plan by hand, or give a scheme like bf16")
        if servers or pipeline:
            raise SchemeError("FSDP2 goes without servers and a pipeline; leave servers= and pipeline= out")
        return attach_to_shards(ddp, scheme, group, timeout_s=timeout_s, **looks)
    if group is not None:
        raise SchemeError("DDP knows its ranks; leave group= out")
    if is_auto:
        check_auto(servers)
        return AutoSession(ddp, timeout_s, pipeline=pipeline, **looks)
    return attach_to_ddp(ddp, scheme, servers=servers, timeout_s=timeout_s, pipeline=pipeline, **looks)


def follow(
    model: nn.Module,
    optimizer: Optimizers,
    scheme: AnyScheme | str = "streaming",
    *,
    group: ProcessGroup | None = None,
    outer_optimizer: MakeOptimizer | None = None,
    node_group: ProcessGroup | None = None,
    on_host: bool = False,
    servers: Sequence[int] = (),
    timeout_s: float | None = None,
    on_mismatch: OnMismatch = "warn",
    check_replicas_every: int = 100,
) -> Follower:
    """Let `model`, which is in no DDP, train apart from others and follow them under `scheme`.

    All ranks of `group` make this call, and all models begin as rank 0's. What the optimizer keeps stays local; under
    gossip SGD's momentum may heed what peers do.

    Args:
        model: The bare model; of one under fully_shard() each shard follows its replicas, who are `group`.
        optimizer: The one that trains it, or a list of several; call follower.step() after each step of all of them.
        scheme: A text like "streaming" or "gossip", a recipe's result, an OuterScheme or a GossipScheme. Under "auto"
            models are averaged once, after eight steps, and then do what a plan on those picks.
        group: Those who follow each other; all ranks unless given.
        outer_optimizer: Makes the outer optimizer from the anchors, instead of the scheme's own.
        node_group: The processes of a node, which share one model by DDP, so that bytes between nodes go once.
        on_host: Whether anchor, outer momentum and residual are kept in the host's memory.
        servers: Ranks that call serve() meanwhile, and are not in `group`; the others then outlive a worker that dies.
        timeout_s: After which a peer that sends nothing is lost: a minute under gossip and servers, else the group's.
        on_mismatch: What to do where the ranks' anchors differ: "warn", "error", or "heal", which takes over what most
            ranks have.
        check_replicas_every: Outer rounds between two such comparisons, of eight bytes each; 0: never.

    Returns:
        A follower: step(), average_(), stats(), state_dict(), load_state_dict(), close().

    Raises:
        SchemeError: The scheme, the model and the options do not fit, or differ between ranks.

    Example:
        >>> follower = laconic.follow(model, optimizer, "streaming")
        >>> optimizer.step(); follower.step()
    """
    if not (hasattr(optimizer, "param_groups") or isinstance(optimizer, list | tuple)):
        raise SchemeError(
            f"follow takes an optimizer, not {optimizer!r}; write laconic.follow(model, optimizer, scheme)"
        )
    check_timeout(timeout_s)
    check_on_mismatch(on_mismatch)
    model = unwrapped(model)
    looks: dict[str, Any] = {
        "timeout_s": timeout_s,
        "on_mismatch": on_mismatch,
        "check_replicas_every": check_replicas_every,
    }
    if scheme != "auto":
        return follow_others(
            model,
            optimizer,
            scheme,
            group=group,
            outer_optimizer=outer_optimizer,
            node_group=node_group,
            on_host=on_host,
            servers=servers,
            **looks,
        )
    check_auto(outer_optimizer, node_group, servers)

    def follow_under(text: str) -> Follower:
        keeps = on_host and parse(text).of_what == "drift"
        return follow_others(model, optimizer, text, group=group, on_host=keeps, **looks)

    return AutoFollower(model, optimizer, group or world(), follow_under, next(model.parameters()).device)
