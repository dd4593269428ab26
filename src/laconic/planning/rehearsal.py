"""Every candidate's exchange rehearsed over the network of a job: its own session on real gradients, untrained."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.adapters.follow import gossip_among
from laconic.layout import Bucket, Layout, plain_name
from laconic.paths import bytes_out
from laconic.planning.answer import Measured
from laconic.planning.candidates import Candidate, kind_of
from laconic.planning.links import LinkCosts, Messages, left_so_far, measure_link_costs, meet, slowest
from laconic.planning.prediction import Compute, Rehearsal
from laconic.scheme import GossipScheme, Scheme
from laconic.session import PHASES, Session
from laconic.transport import Collectives, Group, ProcessGroup, own_group

_AFFORDABLE_S = 0.4  # of wire; of what takes longer, a part of the model is rehearsed
_WARM_UP = 2  # exchanges, until thresholds are known and connections open
_REPEATS = 3
_LONG_S = 0.5  # of an exchange, which then is not warmed up twice, nor repeated
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
    known: dict[Scheme, Rehearsal] = {}  # those that exchange the same are rehearsed once
    rehearsals: dict[Candidate, Rehearsal] = {}
    outer_s = _OUTER_PASSES * slowest(transport, _pass_s(gradients))
    for each in candidates:
        if each.scheme.of_what == "models":
            rehearsals[each] = _rehearse_gossip(each.scheme, gradients, model, compute, transport, links, group)
            continue
        exchanged = each.scheme.exchanged
        if exchanged not in known:
            most_s = (until - time.perf_counter()) / (len(candidates) - len(rehearsals))
            known[exchanged] = rehearse(exchanged, gradients, transport, links, most_s)
        rehearsals[each] = known[exchanged]
        if each.scheme.of_what == "drift":
            rehearsals[each] = replace(known[exchanged], apply_s=known[exchanged].apply_s + outer_s)
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


def _pass_s(gradients: Sequence[tuple[Layout, Tensor]]) -> float:
    """Seconds of a pass over memory that adds one model to another."""
    flat = max((flat for _, flat in gradients), key=Tensor.numel)
    other = flat.clone()
    taken_s = []
    for _ in range(3):
        start = time.perf_counter()
        other.add_(flat)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
        taken_s.append(time.perf_counter() - start)
    return min(taken_s) * sum(layout.num_entries for layout, _ in gradients) / flat.numel()


def rehearse(
    scheme: Scheme,
    gradients: Sequence[tuple[Layout, Tensor]],
    transport: Collectives,
    links: LinkCosts,
    most_s: float = math.inf,
) -> Rehearsal:
    """Exchange copies of `gradients` a few times under a scheme of gradients or drift; a call that all workers make.

    After `most_s` no more than one is repeated.

    Where the link would take long, only as many parameters are exchanged as it carries soon, and the rest follows in
    proportion: its stages by entries, its talk by what the link takes for the bytes, and for each bucket what the
    part took beside that. Where a scheme adds integers in two stages they go to all as frames do: the part tells.
    """
    num_entries = sum(layout.num_entries for layout, _ in gradients)
    num_bytes = _bytes_out(scheme, gradients, transport.num_workers)
    link = links.sums if scheme.exchange.adds_in_flight else links.frames
    expected_s = num_bytes / link.bytes_per_s
    parts = gradients if expected_s <= _AFFORDABLE_S else part_of(gradients, num_entries * _AFFORDABLE_S / expected_s)
    spent, sent, messages = _timed(scheme, parts, transport, most_s)
    entries_share = sum(layout.num_entries for layout, _ in parts) / num_entries
    bytes_share = _bytes_out(scheme, parts, transport.num_workers) / num_bytes if num_bytes else 1.0
    talk_s = spent["exchange"]
    if parts is not gradients:
        if scheme.exchange.adds_in_flight:
            link = min(links.sums, links.frames, key=lambda one: abs(talk_s - one.seconds(sent, messages)))
        beside_s = talk_s - link.seconds(sent, messages)
        messages = messages * len(gradients)  # as many for each bucket
        talk_s = link.seconds(num_bytes, messages) + beside_s * len(gradients)
        talk_s = max(num_bytes / link.bytes_per_s, talk_s)
    fixed_s = link.fixed_s(num_bytes, messages)
    return Rehearsal(
        choose_s=(spent["select"] + spent["encode"]) / entries_share,
        talk_s=talk_s,
        apply_s=spent["decode"] / entries_share,
        bytes_out=round(sent / bytes_share),
        messages=messages,
        fixed_s=min(talk_s, fixed_s),
        busy_talk_s=messages.count * (link.busy_latency_s - link.latency_s),
        num_buckets=len(gradients),
        num_entries=num_entries,
        adds=scheme.exchange.adds_in_flight,
    )


def _bytes_out(scheme: Scheme, gradients: Sequence[tuple[Layout, Tensor]], num_workers: int) -> int:
    return sum(bytes_out(scheme, layout, num_workers) for layout, _ in gradients)


def part_of(gradients: Sequence[tuple[Layout, Tensor]], num_entries: float) -> list[tuple[Layout, Tensor]]:
    """One bucket of about so many entries: the larger parameters, the last of them cut to its first rows."""
    pairs = [(span, flat) for layout, flat in gradients for span in layout.spans if span.num_entries]
    pairs.sort(key=lambda pair: -pair[0].num_entries)
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    parts: list[Tensor] = []
    for span, flat in pairs:
        num_rows, *others = span.shape or (1,)
        row = math.prod(others)
        rows = min(num_rows, max(1, int(num_entries / row)))
        names.append(span.name)
        shapes.append((rows, *others))
        parts.append(flat[span.start : span.start + rows * row])
        num_entries -= rows * row
        if num_entries < 1:
            break
    return [(Layout.of(names, shapes), torch.cat(parts))]


def _timed(
    scheme: Scheme, gradients: Sequence[tuple[Layout, Tensor]], transport: Collectives, most_s: float
) -> tuple[dict[str, float], float, Messages]:
    """(median seconds by phase, the slowest worker's; bytes out and messages of an exchange)."""
    session = Session(scheme, transport, undoes=True)
    phases: list[dict[str, float]] = []
    sent: list[Counter[str]] = []  # bytes by kind
    messages: list[Counter[str]] = []
    begun = time.perf_counter()
    for _ in range(_WARM_UP + _REPEATS):
        if len(phases) > 1:
            too_long_s = max(sum(phases[-1].values()) - _LONG_S, time.perf_counter() - begun - most_s)
            if slowest(transport, too_long_s) > 0:
                break
        bytes_before, messages_before = left_so_far(transport)
        buckets = [
            Bucket(index, layout, flat.clone(), is_last=index == len(gradients) - 1)
            for index, (layout, flat) in enumerate(gradients)
        ]
        meet(transport)
        before = session.stats().seconds
        start = time.perf_counter()
        for bucket in buckets:
            session.exchange_(bucket)
        seconds = time.perf_counter() - start
        spent = {phase: session.stats().seconds[phase] - before[phase] for phase in PHASES}
        spent["decode"] += max(0.0, seconds - sum(spent.values()))  # what no phase claims
        phases.append(spent)
        bytes_after, messages_after = left_so_far(transport)
        sent.append(bytes_after - bytes_before)
        messages.append(messages_after - messages_before)
    settled = slice(min(_WARM_UP, len(phases) - 1), None)
    medians = {phase: statistics.median(spent[phase] for spent in phases[settled]) for phase in PHASES}
    return (
        {phase: slowest(transport, seconds) for phase, seconds in medians.items()},
        statistics.fmean(each.total() for each in sent[settled]),
        equal_messages(sent[-1], messages[-1]),
    )


def equal_messages(num_bytes: Mapping[str, int], count: Counter[str]) -> Messages:
    """The messages by kind: the square of the sum over the sum of squares counts equal ones, and forgets the short."""
    squares = sum(num_bytes[kind] ** 2 / count[kind] for kind in num_bytes)
    return Messages(count.total(), sum(num_bytes.values()) ** 2 / squares if squares else 0.0)


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
    """The parameters of a model that these are parts of, each with its gradient."""
    by_name = {plain_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    twin = nn.ParameterList()
    for layout, flat in parts:
        for span in layout.spans:
            values = by_name[span.name].flatten()[: span.num_entries].view(span.shape)
            parameter = nn.Parameter(values.clone())
            parameter.grad = flat[span.start : span.stop].view(span.shape).to(values.dtype)
            twin.append(parameter)
    return twin
