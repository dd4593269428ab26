"""Look at this host, and with a process group at all of its hosts and what is between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace

import torch.distributed as dist

from laconic.doctor.between import SHORT_BYTES, Packets, everyones
from laconic.doctor.checks import CHECKS, Seen
from laconic.doctor.facts import HostFacts, facts_here
from laconic.doctor.finding import Finding
from laconic.errors import PeerError
from laconic.planning.pairs import EchoTimes, PairProbe, measure_pairs


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
    try:
        seen = replace(_look(group, work, clock), nominal_bits_per_s=nominal_bits_per_s)
    except RuntimeError as error:  # as backends tell of silence
        why = " ".join(str(error).split())
        raise PeerError(
            "a host has ended or says nothing: see what it says, and whether packets of the whole MTU reach it "
            f"(ping -M do -s 1472 HOST) through its firewall ({why:.140})"
        ) from None
    return [finding for check in CHECKS for finding in check(seen)]


def _look(group: dist.ProcessGroup | None, work: Callable[[], object] | None, clock: Callable[[], float]) -> Seen:
    if group is None:
        return Seen((facts_here(work),))
    everyones(group, None)  # so that there are connections to look at
    mine = facts_here(work)
    with closing(Packets(mine.used.address if mine.used else "")) as packets:
        told = everyones(group, [mine.as_dict(), packets.port])
        facts = tuple(HostFacts.from_dict(theirs) for theirs, _ in told)
        leaders = Seen(facts).leaders
        if len(leaders) == 1:
            return Seen(facts)
        if group.rank() in leaders and mine.used and mine.used.address:
            ends = [(facts[rank].used, told[rank][1]) for rank in leaders if rank != group.rank()]
            packets.send(
                group.rank(), mine.used.mtu, [(end.address, port) for end, port in ends if end and end.address]
            )
        probe = PairProbe(group)
        echoes = [probe.echo(0, leader, clock) if group.rank() in (0, leader) else None for leader in leaders[1:]]
        told = everyones(group, [asdict(echo) if echo else None for echo in echoes])  # by when all have sent
        clocks = {leader: EchoTimes(**echo) for leader, echo in zip(leaders[1:], told[0], strict=True)}
        heard = everyones(group, list(packets.heard().items()))
    narrow = tuple(
        (source, target, used.mtu)
        for target, rows in enumerate(heard)
        for source, lengths in rows
        if lengths == [SHORT_BYTES] and (used := facts[source].used)
    )
    if narrow:  # on which a long message would never arrive
        return Seen(facts, (), clocks, narrow)
    pairs = None if len(leaders) == group.size() else [(a, b) for a in leaders for b in leaders if a < b]
    return Seen(facts, measure_pairs(group, pairs), clocks)
