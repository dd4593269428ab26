"""Look at this host, and with a process group at all of its hosts and what is between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from laconic.measure.doctor.between import ClockOffset, Talk
from laconic.measure.doctor.checks import CHECKS, Seen
from laconic.measure.doctor.facts import HostFacts, facts_here
from laconic.measure.doctor.finding import Finding
from laconic.measure.doctor.links import device_of, measure_links


def examine(
    group: dist.ProcessGroup | None = None,
    *,
    nominal_bits_per_s: float | None = None,
    work: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.time,
) -> list[Finding]:
    """What is slow or wrong, the same on all ranks, in under 30 seconds; without a group, on this host alone.

    A call that all ranks of the group make. `nominal_bits_per_s` is what links should carry, where interfaces do not
    say; `work` is what hosts are compared by, and `clock` what is compared.
    """
    seen = replace(_look(group, work, clock), nominal_bits_per_s=nominal_bits_per_s)
    return [finding for check in CHECKS for finding in check(seen)]


def _look(group: dist.ProcessGroup | None, work: Callable[[], object] | None, clock: Callable[[], float]) -> Seen:
    if group is None:
        return Seen((facts_here(work),))
    talk = Talk(group, device_of(group))
    talk.everyones(None)  # so that there are connections to look at
    mine = facts_here(work)
    facts = tuple(HostFacts.from_dict(told) for told in talk.everyones(mine.as_dict()))
    leaders = Seen(facts).leaders
    offsets = {leader: talk.clock_offset(leader, clock) for leader in leaders}
    told = talk.everyones([[rank, one.offset_s, one.error_s] for rank, one in offsets.items() if one])
    clocks = {rank: ClockOffset(offset, error) for rank, offset, error in told[0]}
    if len(leaders) == 1:
        return Seen(facts, None, clocks)
    used = mine.used
    narrow = talk.narrow_paths(leaders, used.address if used else "", used.mtu if used else 0)
    if narrow:  # on which a long message would never arrive
        return Seen(facts, None, clocks, tuple(narrow))
    pairs = None if len(leaders) == group.size() else [(a, b) for a in leaders for b in leaders if a < b]
    return Seen(facts, measure_links(group, (), pairs), clocks)
