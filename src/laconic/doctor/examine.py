"""Look at this host, and with a process group at all of its hosts and what is between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from laconic.doctor.checks import Finding, Seen, findings
from laconic.doctor.facts import HostFacts, facts_here
from laconic.errors import PeerError
from laconic.planning import EchoTimes, PairProbe, measure_pairs
from laconic.transport import place_of_texts, texts

_FACT_BYTES = 1 << 16  # of one rank


def examine(
    group: dist.ProcessGroup | None = None,
    *,
    nominal_bits_per_s: float | None = None,
    work: Callable[[], object] | None = None,
) -> list[Finding]:
    """Find what is slow or wrong, the same on all ranks, in under 30 seconds; without a group, on this host alone.

    A call that all ranks of the group make. `nominal_bits_per_s` is what links should carry, where interfaces do not
    say; `work` is what hosts are compared by.
    """
    try:
        seen = replace(_look(group, work), nominal_bits_per_s=nominal_bits_per_s)
    except (PeerError, RuntimeError) as error:  # as backends report a peer that sends nothing
        why = " ".join(str(error).split())
        raise PeerError(
            "a host has ended or sends nothing: see its log, and whether packets of the whole MTU reach it "
            f"(ping -M do -s 1472 HOST) through its firewall ({why:.140})"
        ) from None
    return findings(seen)


def _look(group: dist.ProcessGroup | None, work: Callable[[], object] | None) -> Seen:
    if group is None:
        return Seen((facts_here(work),))
    gather_all(group, None)  # so that there are connections to look at
    here = facts_here(work)
    facts = tuple(map(HostFacts.from_dict, gather_all(group, asdict(here))))
    leaders = Seen(facts).leaders
    if len(leaders) == 1:
        return Seen(facts)
    probe = PairProbe(group)
    echoes = [probe.echo(0, leader) if group.rank() in (0, leader) else None for leader in leaders[1:]]
    of_first = gather_all(group, [asdict(echo) if echo else None for echo in echoes])[0]
    clocks = {leader: EchoTimes(**echo) for leader, echo in zip(leaders[1:], of_first, strict=True)}
    pairs = None if len(leaders) == group.size() else [(a, b) for a in leaders for b in leaders if a < b]
    return Seen(facts, measure_pairs(group, pairs), clocks)


def gather_all(group: dist.ProcessGroup, own: Any) -> list[Any]:
    """The object of each rank, in JSON and by rank; a call that all make."""
    return [json.loads(text) for text in texts(group, place_of_texts(group), json.dumps(own), _FACT_BYTES)]
