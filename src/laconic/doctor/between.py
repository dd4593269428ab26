"""What is between hosts beside rates: what ranks tell each other over any path, and how long a packet may be."""

from __future__ import annotations

import json
import select
import socket
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from laconic.transport import place_of_texts

_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # packets are sent whole, whatever the kernel thinks of the way
_HEADERS = 28  # of IP and UDP
SHORT_BYTES = 512
_LONG_BYTES = 9000  # of a jumbo frame; a packet of the loopback's 65,536 cannot be sent at all
_TRIES = 3
_PACKETS_S = 0.5


def everyones(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What each rank says, in JSON and by rank; a call that all make, by way of the first.

    No connection has more than one short piece under way: where TCP joins two, or sends them again as one, the packet
    may be longer than a narrow path takes, and then never arrives.
    """
    if group.rank() > 0:
        _send(group, mine, [0])
        (said,) = _received(group, [0])
        return list(said)
    others = range(1, group.size())
    everyone = [json.loads(json.dumps(mine)), *_received(group, others)]
    _send(group, everyone, others)
    return everyone


def _send(group: dist.ProcessGroup, said: Any, peers: Iterable[int]) -> None:
    """Piece by piece: the first byte says whether another follows, which then waits until all peers have this one."""
    packed = zlib.compress(json.dumps(said).encode())
    for start in range(0, len(packed), SHORT_BYTES - 1):
        part = packed[start : start + SHORT_BYTES - 1]
        more = start + len(part) < len(packed)
        piece = torch.frombuffer(bytearray([more, *part.ljust(SHORT_BYTES - 1, b"\0")]), dtype=torch.uint8)
        _send_all(group, piece, peers)
        if more:
            _receive_all(group, 1, peers)


def _received(group: dist.ProcessGroup, peers: Sequence[int]) -> list[Any]:
    packed = {peer: b"" for peer in peers}
    talking = list(peers)
    while talking:
        pieces = _receive_all(group, SHORT_BYTES, talking)
        for peer, piece in pieces.items():
            packed[peer] += piece[1:]
        talking = [peer for peer, piece in pieces.items() if piece[0]]
        _send_all(group, torch.zeros(1, dtype=torch.uint8), talking)
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


class Packets:
    """Packets between hosts that are sent whole: of which lengths they arrive."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address or "0.0.0.0", 0))
        self.port: int = self._socket.getsockname()[1]

    def send(self, rank: int, mtu: int, places: Sequence[tuple[str, int]]) -> None:
        """Some of a short length and of the longest that this rank's interface takes, to each place."""
        self._socket.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        for length in (SHORT_BYTES, min(mtu, _LONG_BYTES)):
            packet = json.dumps([rank, length]).encode().ljust(length - _HEADERS)
            for place in [*places] * _TRIES:
                try:
                    self._socket.sendto(packet, place)
                except OSError:  # longer than what this host itself would send
                    break

    def heard(self) -> dict[int, list[int]]:
        """The lengths that came from each rank, within half a second."""
        found: dict[int, set[int]] = {}
        end = time.monotonic() + _PACKETS_S
        while select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                rank, length = json.loads(self._socket.recv(1 << 16))
            except (ValueError, TypeError):  # somebody else's
                continue
            found.setdefault(rank, set()).add(length)
        return {rank: sorted(lengths) for rank, lengths in found.items()}

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()
