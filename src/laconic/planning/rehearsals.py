"""Every candidate's exchange, rehearsed over the network of a job."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.adapters.follow import gossip_among
from laconic.layout import Layout, plain_name
from laconic.planning.answer import Measured
from laconic.planning.candidates import Candidate, kind_of
from laconic.planning.link_costs import LinkCosts, Messages, measure_link_costs, slowest
from laconic.planning.prediction import Compute
from laconic.planning.rehearsal import Rehearsal, part_of, rehearse
from laconic.scheme import GossipScheme
from laconic.transport import Group, ProcessGroup, own_group

_OUTER_PASSES = 10  # over the model in an outer step: drift, anchor, momentum, model
_MOST_GOSSIP_STEPS = 10
_LEAST_GOSSIP_STEPS = 5
_GOSSIP_S = 5.0  # for which steps are taken
_GOSSIP_STEP_S = 0.1  # at most, between two of them
_GOSSIP_WIRE_S = 1.2  # for a whole model; of a larger one, a part gossips


def measure_exchanges(
    candidates: Sequence[Candidate],
    gradients: Sequence[tuple[Layout, Tensor]],
    model: nn.Module,
    optimizer: str,
    compute: Compute,
    transport: Group,
    group: ProcessGroup,
    busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    until: float = math.inf,
) -> Measured:
    """Measure the links and each candidate's exchange over them; a call that all ranks make.

    `until` is when it should be over, by time.perf_counter(): repetitions are spared for that.
    """
    links = measure_link_costs(transport, busy)
    rehearsals = _rehearse_all(candidates, gradients, model, compute, transport, links, group, until)
    return Measured(
        compute=compute,
        links=links,
        rehearsals=tuple(rehearsals.items()),
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
    until: float,
) -> dict[Candidate, Rehearsal]:
    """Each candidate's exchange; those that say the same are rehearsed once."""
    known: dict[object, Rehearsal] = {}
    found: dict[Candidate, Rehearsal] = {}
    pass_s = slowest(transport, _pass_s(gradients))
    for asked in candidates:
        scheme = asked.scheme
        if scheme.of_what == "models":
            found[asked] = _rehearse_gossip(scheme, gradients, model, compute, transport, links, group)
            continue
        key = scheme.exchanged
        if key not in known:
            most_s = (until - time.perf_counter()) / (len(candidates) - len(found))
            known[key] = rehearse(scheme.exchanged, gradients, transport, links, most_s)
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
    """Some steps of a copy of the model, with pauses where it would train.

    Where the link would take long, of a part of it, and the rest follows in proportion. Who keeps an appointment waits
    in its step for what crosses; what is beyond that is the worker's own.
    """
    spans = [span for layout, _ in gradients for span in layout.spans]
    num_entries = sum(span.num_entries for span in spans)
    bytes_out = scheme.bytes_out(Layout.of([s.name for s in spans], [s.num_entries for s in spans]), group.size())
    talk_s = links.frames.seconds(bytes_out)
    parts = gradients if talk_s <= _GOSSIP_WIRE_S else part_of(gradients, num_entries * _GOSSIP_WIRE_S / talk_s)
    twin = _twin(model, parts)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    device = parts[0][1].device
    follower = gossip_among(twin, optimizer, scheme, Group(own_group(group, device), device))
    number = max(_LEAST_GOSSIP_STEPS, min(_MOST_GOSSIP_STEPS, round(_GOSSIP_S / talk_s)))

    def step_s() -> float:
        time.sleep(min(compute.alone_s, _GOSSIP_STEP_S))
        optimizer.step()
        start = time.perf_counter()
        follower.step()
        return time.perf_counter() - start

    step_s()  # for which connections are tried and kernels compiled
    taken_s = slowest(transport, statistics.fmean(step_s() for _ in range(number)))
    follower.close()
    taken_s *= num_entries / sum(layout.num_entries for layout, _ in parts)
    own_s = taken_s if scheme.exchange.mode == "free" else max(0.0, taken_s - talk_s)
    return Rehearsal(
        choose_s=own_s,
        talk_s=talk_s,
        apply_s=0.0,
        bytes_out=bytes_out,
        messages=Messages(),
        fixed_s=0.0,
        busy_talk_s=0.0,
        num_buckets=1,
        num_entries=num_entries,
        adds=False,
    )


def _twin(model: nn.Module, parts: Sequence[tuple[Layout, Tensor]]) -> nn.ParameterList:
    """What of a model these are parts of, each with its gradient."""
    by_name = {plain_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    twin = nn.ParameterList()
    for layout, flat in parts:
        for span in layout.spans:
            values = by_name[span.name].flatten()[: span.num_entries].view(span.shape)
            parameter = nn.Parameter(values.clone())
            parameter.grad = flat[span.start : span.stop].view(span.shape).to(values.dtype)
            twin.append(parameter)
    return twin
