"""An exchange rehearsed: the scheme's own session over the real network, on real gradients, without training."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.layout import Bucket, Layout
from laconic.paths import bytes_out
from laconic.planning.link_costs import LinkCosts, Messages, left_so_far, meet, slowest
from laconic.scheme import Scheme
from laconic.session import PHASES, Session
from laconic.transport import Collectives

_AFFORDABLE_S = 0.4  # of wire; of what takes longer, a part of the model is rehearsed
_WARM_UP = 2  # exchanges, until thresholds are known and connections open
_REPEATS = 3
_LONG_S = 0.5  # of an exchange, which then is not warmed up twice, nor repeated


@dataclass(frozen=True)
class Rehearsal:
    """What one exchange of the whole model costs a worker, in seconds by station."""

    choose_s: float  # with encoding
    talk_s: float
    apply_s: float  # with decoding
    bytes_out: int
    messages: Messages
    fixed_s: float  # of talk_s, what does not depend on bytes
    busy_talk_s: float  # what messages take longer while all workers compute
    num_buckets: int
    num_entries: int
    adds: bool  # whether the network adds the messages

    @property
    def work_s(self) -> float:
        """What this worker's own cores or device do."""
        return self.choose_s + self.apply_s

    def on(self, here: LinkCosts, there: LinkCosts) -> "Rehearsal":
        """The same exchange over other links: what was waited for beyond bytes and latency stays."""
        old = here.sums if self.adds else here.frames
        new = there.sums if self.adds else there.frames
        rest = max(0.0, self.talk_s - old.seconds(self.bytes_out, self.messages))
        return replace(
            self,
            talk_s=new.seconds(self.bytes_out, self.messages) + rest,
            fixed_s=new.fixed_s(self.bytes_out, self.messages) + rest,
            busy_talk_s=self.messages.count * (new.busy_latency_s - new.latency_s),
        )


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
    proportion: its stations by entries, its talk by what the link takes for the bytes, and for each bucket what the
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
    found: list[dict[str, float]] = []
    sent: list[Counter[str]] = []  # bytes by kind
    messages: list[Counter[str]] = []
    begun = time.perf_counter()
    for _ in range(_WARM_UP + _REPEATS):
        if len(found) > 1:
            too_long_s = max(sum(found[-1].values()) - _LONG_S, time.perf_counter() - begun - most_s)
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
        if session.wants_whole_step:
            session.exchange_step_(buckets)
        else:
            for bucket in buckets:
                session.exchange_(bucket)
        seconds = time.perf_counter() - start
        spent = {phase: session.stats().seconds[phase] - before[phase] for phase in PHASES}
        spent["decode"] += max(0.0, seconds - sum(spent.values()))  # what no phase claims
        found.append(spent)
        bytes_after, messages_after = left_so_far(transport)
        sent.append(bytes_after - bytes_before)
        messages.append(messages_after - messages_before)
    settled = slice(min(_WARM_UP, len(found) - 1), None)
    medians = {phase: statistics.median(spent[phase] for spent in found[settled]) for phase in PHASES}
    return (
        {phase: slowest(transport, seconds) for phase, seconds in medians.items()},
        statistics.fmean(each.total() for each in sent[settled]),
        _messages(sent[-1], messages[-1]),
    )


def _messages(num_bytes: Mapping[str, int], count: Counter[str]) -> Messages:
    """By kind: the square of the sum over the sum of squares counts equal ones, and forgets the short."""
    squares = sum(num_bytes[kind] ** 2 / count[kind] for kind in num_bytes)
    return Messages(count.total(), sum(num_bytes.values()) ** 2 / squares if squares else 0.0)
