"""Look at this host, and with a process group at all of its hosts and what is between them."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from laconic.doctor.checks import Finding, Seen, findings
from laconic.doctor.facts import HostFacts, facts_here
from laconic.errors import PeerError
from laconic.planning import EchoTimes, PairProbe, measure_pairs
from laconic.transport import SHORT_BYTES, Packets, place_of_texts


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
    except RuntimeError as error:  # as backends report a peer that sends nothing
        why = " ".join(str(error).split())
        raise PeerError(
            "a host has ended or sends nothing: see its log, and whether packets of the whole MTU reach it "
            f"(ping -M do -s 1472 HOST) through its firewall ({why:.140})"
        ) from None
    return findings(seen)


def _look(group: dist.ProcessGroup | None, work: Callable[[], object] | None, clock: Callable[[], float]) -> Seen:
    if group is None:
        return Seen((facts_here(work),))
    gather_all(group, None)  # so that there are connections to look at
    here = facts_here(work)
    with closing(Packets(here.used.address if here.used else "")) as packets:
        gathered = gather_all(group, [asdict(here), packets.port])
        facts = tuple(HostFacts.from_dict(theirs) for theirs, _ in gathered)
        leaders = Seen(facts).leaders
        if len(leaders) == 1:
            return Seen(facts)
        if group.rank() in leaders and here.used and here.used.address:
            ends = [(facts[rank].used, gathered[rank][1]) for rank in leaders if rank != group.rank()]
            places = [(end.address, port) for end, port in ends if end and end.address]
            packets.send(group.rank(), here.used.mtu, places)
        probe = PairProbe(group)
        echoes = [probe.echo(0, leader, clock) if group.rank() in (0, leader) else None for leader in leaders[1:]]
        of_first = gather_all(group, [asdict(echo) if echo else None for echo in echoes])[0]  # by when all have sent
        clocks = {leader: EchoTimes(**echo) for leader, echo in zip(leaders[1:], of_first, strict=True)}
        received = gather_all(group, list(packets.received().items()))
    narrow = tuple(
        (source, target, used.mtu)
        for target, rows in enumerate(received)
        for source, lengths in rows
        if lengths == [SHORT_BYTES] and (used := facts[source].used)
    )
    if narrow:  # on which a long message would never arrive
        return Seen(facts, (), clocks, narrow)
    pairs = None if len(leaders) == group.size() else [(a, b) for a in leaders for b in leaders if a < b]
    return Seen(facts, measure_pairs(group, pairs), clocks)


def gather_all(group: dist.ProcessGroup, own: Any) -> list[Any]:
    """What each rank has, in JSON and by rank; a call that all make, by way of the first.

    No connection has more than one short piece under way: where TCP joins two, or sends them again as one, the packet
    may be longer than a narrow path takes, and then never arrives.
    """
    if group.rank() > 0:
        _send(group, own, [0])
        (everyone,) = _received(group, [0])
        return list(everyone)
    others = range(1, group.size())
    everyone = [json.loads(json.dumps(own)), *_received(group, others)]
    _send(group, everyone, others)
    return everyone


def _send(group: dist.ProcessGroup, content: Any, peers: Iterable[int]) -> None:
    """Piece by piece: the first byte tells whether another follows, which then waits until all peers have this one."""
    packed = zlib.compress(json.dumps(content).encode())
    for start in range(0, len(packed), SHORT_BYTES - 1):
        part = packed[start : start + SHORT_BYTES - 1]
        more = start + len(part) < len(packed)
        piece = torch.frombuffer(bytearray([more, *part.ljust(SHORT_BYTES - 1, b"\0")]), dtype=torch.uint8)
        _send_all(group, piece, peers)
        if more:
            _receive_all(group, 1, peers)


def _received(group: dist.ProcessGroup, peers: Sequence[int]) -> list[Any]:
    packed = {peer: b"" for peer in peers}
    sending = list(peers)
    while sending:
        pieces = _receive_all(group, SHORT_BYTES, sending)
        for peer, piece in pieces.items():
            packed[peer] += piece[1:]
        sending = [peer for peer, piece in pieces.items() if piece[0]]
        _send_all(group, torch.zeros(1, dtype=torch.uint8), sending)
    return [json.loads(zlib.decompressobj().decompress(packed[peer])) for peer in peers]


def _send_all(group: dist.ProcessGroup, message: torch.Tensor, peers: Iterable[int]) -> None:
    message = message.to(place_of_texts(group))
    for work in [dist.isend(message, group=group, group_dst=peer) for peer in peers]:
        assert work is not None  # this rank is in the group
        work.wait()


def _receive_all(group: dist.ProcessGroup, length: int, peers: Iterable[int]) -> dict[int, bytes]:
    rooms = {peer: torch.zeros(length, dtype=torch.uint8, device=place_of_texts(group)) for peer in peers}
    for work in [dist.irecv(room, group=group, group_src=peer) for peer, room in rooms.items()]:
        assert work is not None
        work.wait()
    return {peer: room.cpu().numpy().tobytes() for peer, room in rooms.items()}
