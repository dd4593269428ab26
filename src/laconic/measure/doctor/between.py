"""What is measured between hosts beside links: clocks, by echo, and how long a packet may be."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_ECHOES = 5
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # packets are sent whole, whatever the kernel thinks of the way
_HEADERS = 28  # of IP and UDP
_SHORT_BYTES = 512
_LONG_BYTES = 9000  # of a jumbo frame; a packet of the loopback's 65,536 cannot be sent at all
_TRIES = 3
_PACKETS_S = 0.5


@dataclass(frozen=True)
class ClockOffset:
    """By how much a host's clock is ahead of the first one's."""

    offset_s: float
    error_s: float  # half of the round trip by which it was seen


class Talk:
    """What the processes of a group tell each other, in JSON; each call is one of all of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()

    def everyones(self, mine: Any) -> list[Any]:
        """What each rank says, by rank, in short packets: where long ones get lost, TCP would wait for ever."""
        said = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self._gathered(torch.tensor([said.numel()]))]
        room = torch.zeros(max(lengths), dtype=torch.uint8)
        room[: said.numel()] = said
        starts = range(0, room.numel(), _SHORT_BYTES)
        pieces = [self._gathered(room[start : start + _SHORT_BYTES]) for start in starts]
        rows = [b"".join(piece.numpy().tobytes() for piece in row) for row in zip(*pieces, strict=True)]
        return [json.loads(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def clock_offset(self, leader: int, clock: Callable[[], float]) -> ClockOffset | None:
        """That of a leader's clock, by the shortest of some echoes; None but on rank 0 and for itself."""
        if self.rank not in (0, leader) or leader == 0:
            return None
        note = torch.zeros(1, dtype=torch.float64, device=self.device)
        seen = []
        for _ in range(_ECHOES):
            if self.rank == leader:
                dist.recv(note, group=self.group, group_src=0)
                float(note)  # waits for it
                note.fill_(clock())
                dist.send(note, group=self.group, group_dst=0)
                continue
            before = clock()
            start = time.perf_counter()
            dist.send(note, group=self.group, group_dst=leader)
            dist.recv(note, group=self.group, group_src=leader)
            theirs = float(note)
            round_trip = time.perf_counter() - start
            seen.append(ClockOffset(theirs - (before + round_trip / 2), round_trip / 2))
        return min(seen, key=lambda one: one.error_s, default=None)

    def narrow_paths(self, leaders: Sequence[int], address: str, mtu: int) -> list[tuple[int, int, int]]:
        """(source, target, bytes) where a short packet arrives and one of the source's MTU does not."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
            ear.bind((address or "0.0.0.0", 0))
            length = min(mtu, _LONG_BYTES)
            places = self.everyones([address, ear.getsockname()[1], length])
            if self.rank in leaders and address:
                others = [places[peer] for peer in leaders if peer != self.rank and places[peer][0]]
                for each in (_SHORT_BYTES, length):
                    for place in others:
                        _send_whole(ear, self.rank, each, (place[0], place[1]))
            self.everyones(None)  # all have sent
            heard = _heard(ear) if self.rank in leaders else {}
        told = self.everyones([[source, sorted(lengths)] for source, lengths in heard.items()])
        return [
            (source, target, places[source][2])
            for target, rows in enumerate(told)
            for source, lengths in rows
            if lengths == [_SHORT_BYTES]
        ]

    def _gathered(self, row: torch.Tensor) -> list[torch.Tensor]:
        mine = row.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(rows, mine, group=self.group)
        return [other.cpu() for other in rows]


def _send_whole(ear: socket.socket, rank: int, length: int, place: tuple[str, int]) -> None:
    ear.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
    packet = json.dumps([rank, length]).encode().ljust(length - _HEADERS)
    for _ in range(_TRIES):
        try:
            ear.sendto(packet, place)
        except OSError:  # longer than what this host itself would send
            return


def _heard(ear: socket.socket) -> Mapping[int, set[int]]:
    """The lengths of packets that came from each rank."""
    found: dict[int, set[int]] = {}
    end = time.monotonic() + _PACKETS_S
    while select.select([ear], [], [], max(0.0, end - time.monotonic()))[0]:
        packet = ear.recv(1 << 16)
        try:
            rank, length = json.loads(packet)
        except (ValueError, TypeError):  # somebody else's
            continue
        found.setdefault(rank, set()).add(length)
    return found
