"""Every candidate's exchange, rehearsed over the network of a job."""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.attach.follow import follow
from laconic.layout import Layout, plain_name
from laconic.planning import (
    Candidate,
    Compute,
    LinkCosts,
    Measured,
    Messages,
    Rehearsal,
    kind_of,
    measure_link_costs,
    rehearse,
    slowest,
)
from laconic.scheme import GossipScheme, OuterScheme, Scheme
from laconic.transport import Group, ProcessGroup

_OUTER_PASSES = 10  # over the model in an outer step: drift, anchor, momentum, model
_GOSSIP_STEPS = 10
_GOSSIP_STEP_S = 0.1  # at most, between two of them


def measure_exchanges(
    candidates: Sequence[Candidate],
    gradients: Sequence[tuple[Layout, Tensor]],
    model: nn.Module,
    optimizer: str,
    compute: Compute,
    transport: Group,
    group: ProcessGroup,
    busy: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Measured:
    """Measure the links and each candidate's exchange over them; a call that all ranks make."""
    links = measure_link_costs(transport, busy)
    return Measured(
        compute=compute,
        links=links,
        rehearsals=tuple(_rehearse_all(candidates, gradients, model, compute, transport, links, group).items()),
        tried_s=(),
        layouts=tuple(layout for layout, _ in gradients),
        num_workers=transport.num_workers,
        kind=kind_of(model),
        optimizer=optimizer,
        device=gradients[0][1].device.type,
    )


def _rehearse_all(
    candidates: Sequence[Candidate],
    gradients: Sequence[tuple[Layout, Tensor]],
    model: nn.Module,
    compute: Compute,
    transport: Group,
    links: LinkCosts,
    group: ProcessGroup,
) -> dict[Candidate, Rehearsal]:
    """Each candidate's exchange; those that say the same are rehearsed once."""
    known: dict[object, Rehearsal] = {}
    found = {}
    pass_s = slowest(transport, _pass_s(gradients))
    for asked in candidates:
        scheme = asked.scheme
        if isinstance(scheme, GossipScheme):
            found[asked] = _rehearse_gossip(scheme, gradients, model, compute, transport, links, group)
            continue
        assert isinstance(scheme, Scheme | OuterScheme)
        said = scheme.said
        key = said.select, said.quantize, said.memory, said.exchange, said.trigger
        if key not in known:
            known[key] = rehearse(scheme, gradients, transport, links)
        found[asked] = known[key]
        if scheme.of_what == "drift":
            outer_s = _OUTER_PASSES * pass_s
            found[asked] = replace(known[key], apply_s=known[key].apply_s + outer_s)
    return found


def _pass_s(gradients: Sequence[tuple[Layout, Tensor]]) -> float:
    """Seconds of a pass over memory that adds one model to another."""
    flat = max((flat for _, flat in gradients), key=Tensor.numel)
    other = flat.clone()
    found = []
    for _ in range(3):
        start = time.perf_counter()
        other.add_(flat)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        found.append(time.perf_counter() - start)
    return min(found) * sum(layout.num_entries for layout, _ in gradients) / flat.numel()


def _rehearse_gossip(
    scheme: GossipScheme,
    gradients: Sequence[tuple[Layout, Tensor]],
    model: nn.Module,
    compute: Compute,
    transport: Group,
    links: LinkCosts,
    group: ProcessGroup,
) -> Rehearsal:
    """Some steps of a copy of the model, with pauses where it would train."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    by_name = {span.name: flat[span.start : span.stop] for layout, flat in gradients for span in layout.spans}
    follower = follow(twin, optimizer, scheme, group=group)
    for _ in range(_GOSSIP_STEPS):
        time.sleep(min(compute.alone_s, _GOSSIP_STEP_S))
        for name, parameter in twin.named_parameters():
            if plain_name(name) in by_name:
                parameter.grad = by_name[plain_name(name)].view_as(parameter).to(parameter.dtype)
        optimizer.step()
        follower.step()
    own_s = slowest(transport, sum(follower.stats().seconds.values()) / _GOSSIP_STEPS)
    follower.close()
    num_entries = sum(layout.num_entries for layout, _ in gradients)
    whole = Layout.of([name for name in by_name], [flat.numel() for flat in by_name.values()])
    bytes_out = scheme.bytes_out(whole, group.size())
    return Rehearsal(
        choose_s=own_s,
        talk_s=links.frames.seconds(bytes_out),
        apply_s=0.0,
        bytes_out=bytes_out,
        messages=Messages(),
        fixed_s=0.0,
        busy_talk_s=0.0,
        num_buckets=1,
        num_entries=num_entries,
        adds=False,
    )
