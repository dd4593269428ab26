"""follow(model, optimizer, scheme): a model that trains apart, and agrees with the others or gossips."""

from collections.abc import Sequence

import torch
from torch import nn

from laconic.adapters.fsdp import check_replicas, shard_of
from laconic.adapters.rank_agreement import begin_alike_, check_common, tensors_of
from laconic.errors import LaunchError, SchemeError
from laconic.recipes import parse
from laconic.replicas import Follower, MakeOptimizer, Optimizers, OuterRounds, policy_for
from laconic.scheme import AnyScheme, GossipScheme, OuterScheme
from laconic.server.client import ServerClient, connect_to_servers, fail_servers
from laconic.server.serve import TIMEOUT_S, served_scheme, worker_terms
from laconic.session import OnMismatch
from laconic.transport import (
    Everyone,
    Group,
    ProcessGroup,
    TcpMailbox,
    counterparts,
    longest_message,
    open_mailbox,
    own_group,
    ranks_that_differ,
    world,
    world_without,
)


def follow_others(
    model: nn.Module,
    optimizer: Optimizers,
    scheme: AnyScheme | str,
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
    """What laconic.follow() does, whose options it takes, for a scheme that was chosen."""
    scheme = _checked(model, scheme)
    if scheme.of_what == "models" and (outer_optimizer or node_group is not None or on_host or servers):
        raise SchemeError(
            f"{scheme} has no outer steps; leave outer_optimizer=, node_group=, on_host= and servers= out"
        )
    if servers and node_group is not None:
        raise SchemeError("servers answer single processes, and node_group= joins several; give one of the two")
    if servers:
        served_scheme(scheme)  # refused before anyone waits
    is_sharded = check_replicas(model, group)
    group = group or (world_without(servers) if servers else world())
    device = next(model.parameters()).device
    check_common(model, scheme, group, device)
    try:
        meeting = Group(own_group(group, device, timeout_s), device)
    except LaunchError as error:
        if servers:
            fail_servers(servers, str(error))
        raise
    begin_alike_(model, group, meeting, device)
    if scheme.of_what == "models":
        follower = gossip_among(model, optimizer, scheme, meeting, timeout_s or TIMEOUT_S)
        follower.everyone = Everyone(group)
        return follower
    node = None
    if node_group is not None:
        node = Group(own_group(node_group, device, timeout_s), device)
        meeting.close()
        meeting = Group(counterparts(group, node_group, device, timeout_s), device)
    policy = OuterRounds(
        model,
        optimizer,
        scheme,
        _end(model, scheme, meeting, servers, timeout_s or TIMEOUT_S),
        outer_optimizer=outer_optimizer,
        node=node,
        home=torch.device("cpu") if on_host else None,
        on_mismatch=on_mismatch,
        check_replicas_every=check_replicas_every,
        shard=shard_of(model),
    )
    if others := ranks_that_differ(group, device, policy.outer_optimizer):
        policy.close()
        raise SchemeError(
            f"rank {others[0]} gave another outer_optimizer=, or inner momentum; give the same on all ranks"
        )
    if device.type == "cuda" and not servers:  # whose state a rehearsal would be part of
        policy.rehearse()
    follower = Follower(policy)
    follower.everyone = Everyone(world() if is_sharded else group)
    return follower


def gossip_among(
    model: nn.Module,
    optimizer: Optimizers,
    scheme: GossipScheme,
    meeting: Group,
    timeout_s: float = TIMEOUT_S,
) -> Follower:
    """A follower in a gossip among all ranks of a group, whose model begins as it is; a call that all of them make."""
    end: Group | TcpMailbox = meeting
    if scheme.exchange.mode != "matched":
        longest = longest_message(tensors_of(model))
        end = open_mailbox(meeting, scheme.exchange.patience, timeout_s, longest)
        meeting.close()
    return Follower(policy_for(model, optimizer, scheme, end))


def _checked(model: nn.Module, scheme: AnyScheme | str) -> GossipScheme | OuterScheme:
    """The scheme, if it is one of models and this model can follow."""
    scheme = parse(scheme)
    if scheme.of_what == "gradients":
        raise SchemeError(
            f"follow takes a scheme of models, and {scheme} exchanges gradients; use laconic.attach, or one like "
            "streaming or gossip"
        )
    if hasattr(model, "register_comm_hook"):
        raise SchemeError("follow takes the bare model, not a DistributedDataParallel; give its .module")
    if scheme.of_what == "models" and any(hasattr(p, "to_local") for p in model.parameters()):
        raise SchemeError(f"{scheme} takes whole models, and this one is sharded; use one like streaming")
    if next(model.parameters(), None) is None:
        raise SchemeError("the model has no parameters; follow one that has")
    return scheme


def _end(
    model: nn.Module, scheme: OuterScheme, meeting: Group, servers: Sequence[int], timeout_s: float
) -> Group | ServerClient:
    """This worker's end of the network that drifts go through."""
    if not servers:
        return meeting
    meeting.close()
    longest = longest_message(tensors_of(model))
    terms = worker_terms(served_scheme(scheme), undoes=True, holds_idle=False, longest=longest)
    return connect_to_servers(meeting.rank, meeting.num_workers, servers, terms, timeout_s, longest)
