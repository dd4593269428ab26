"""What links really carry, by the backend that training uses: pairs both ways, and collectives by size."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.transport import Group, backend_for, silence_said, world

SIZES = tuple(4**power for power in range(6, 13))  # 4 kB to 16 MB
_ALL_PAIRS_RANKS = 8  # beyond, 28 pairs become too many
_ECHOES = 9
_ECHOES_S = 0.3  # after which so many echoes are enough, though at least one is timed
_HEAD_BYTES = 8
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 24
_GROWTH = 4
_LONG_ENOUGH_S = 0.1  # a transfer so long is told from latency, and the next would take four times as long
_STARTING = 4  # short messages, in whose time TCP may still be opening its window
_PAIRS_S = 6.0  # for all pairs together
_TOO_LONG_S = 1.0  # which a collective is not foreseen to take
_ROUNDS = 3


@dataclass(frozen=True)
class PairLink:
    """What one rank sends to another."""

    source: int
    target: int
    latency_s: float  # half of the round trip of 8 bytes
    bytes_per_s: float  # of a message long enough


@dataclass(frozen=True)
class Links:
    """Every measured pair, both ways, and the seconds that collectives of all ranks take."""

    num_ranks: int
    backend: str
    pairs: tuple[PairLink, ...]
    # Seconds by bytes of each rank: all_reduce and all_gather of the backend, frames by laconic's own connections.
    collectives: Mapping[str, Mapping[int, float]]

    def as_dict(self) -> dict[str, Any]:
        """Its JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Links:
        """What as_dict told, read from JSON too, where sizes are texts."""
        return cls(
            told["num_ranks"],
            told["backend"],
            tuple(PairLink(**pair) for pair in told["pairs"]),
            {
                name: {int(size): seconds for size, seconds in times.items()}
                for name, times in told["collectives"].items()
            },
        )


def measure_links(
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] = SIZES,
    pairs: Iterable[tuple[int, int]] | None = None,
) -> Links:
    """Measure latency and rate between pairs of ranks, and collectives of these sizes, in under 15 seconds.

    A call that all ranks of the group make. Without `pairs`, all of up to 8 ranks, and some of more. Pairs that share
    no rank are measured at once, as a collective uses them.
    """
    group = group or world()
    device = device_of(group)
    rounds = _rounds(_some_pairs(group.size()) if pairs is None else pairs)
    probe = _Probe(group, device)
    most_s = _PAIRS_S / max(1, 2 * len(rounds))
    with silence_said(group.rank()):
        latencies = probe.everyones(_measured(probe, rounds, probe.latency_s))
        there = probe.everyones(_measured(probe, rounds, partial(probe.bytes_per_s, most_s)))
        back = [[(b, a) for a, b in one] for one in rounds]
        rates = probe.everyones(_measured(probe, back, partial(probe.bytes_per_s, most_s)))
        found = []
        for a, b in sorted(pair for one in rounds for pair in one):
            found += [PairLink(a, b, latencies[a][b], there[a][b]), PairLink(b, a, latencies[a][b], rates[b][a])]
        slowest = min((pair.bytes_per_s for pair in found), default=math.inf)
        times = _collectives(probe, sorted(sizes), slowest) if sizes and group.size() > 1 else {}
    found.sort(key=lambda pair: (pair.source, pair.target))
    return Links(group.size(), backend_for(group, device), tuple(found), times)


class _Probe:
    """One rank's end of the measuring: messages to and from a peer, waited for."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()

    def latency_s(self, source: int, target: int) -> float:
        """Half of the median round trip; a call of both, of which the source decides how often."""
        if self.rank == target:
            going = True
            while going:
                note = self.receive_(self._head(0), source)
                going = bool(note)
                self.send(note, source)
            return 0.0
        round_trips: list[float] = []
        going = True
        while going:
            going = not round_trips or (len(round_trips) < _ECHOES and sum(round_trips) < _ECHOES_S)
            start = time.perf_counter()
            self.send(self._head(int(going)), target)
            self.receive_(self._head(0), target)
            round_trips.append(time.perf_counter() - start)
        return statistics.median(round_trips[1:]) / 2  # in the first the target may have been elsewhere

    def bytes_per_s(self, most_s: float, source: int, target: int) -> float:
        """By what a long message takes beyond a short one; a call of both, of which the source decides on lengths."""
        if self.rank == target:
            while length := int(self.receive_(self._head(0), source)):
                self.receive_(self._bytes(length), source)
                self.send(self._head(length), source)
            return 0.0
        self._seconds(_HEAD_BYTES, target)
        end = time.perf_counter() + most_s
        short_s = min(self._seconds(_HEAD_BYTES, target) for _ in range(2))
        length = _FIRST_BYTES
        while True:
            taken_s = max(self._seconds(length, target) - short_s, 1e-6)
            late = time.perf_counter() + (_GROWTH - 1) * taken_s > end
            if taken_s > _LONG_ENOUGH_S + _STARTING * short_s or length >= _MOST_BYTES or late:
                break
            length *= _GROWTH
        self.send(self._head(0), target)
        return length / taken_s

    def everyones(self, mine: Sequence[float]) -> list[list[float]]:
        """What each rank says, by rank; nobody has it before all are here."""
        row = torch.tensor(mine, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(row) for _ in range(self.group.size())]
        dist.all_gather(rows, row, group=self.group)
        return [other.tolist() for other in rows]

    def send(self, message: Tensor, peer: int) -> None:
        dist.send(message, group=self.group, group_dst=peer)
        self.wait()

    def receive_(self, message: Tensor, peer: int) -> Tensor:
        """Overwrite `message` with what the peer sends."""
        dist.recv(message, group=self.group, group_src=peer)
        self.wait()
        return message

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _seconds(self, length: int, target: int) -> float:
        message = self._bytes(length)
        start = time.perf_counter()
        self.send(self._head(length), target)
        self.send(message, target)
        self.receive_(self._head(0), target)
        return time.perf_counter() - start

    def _head(self, length: int) -> Tensor:
        return torch.tensor([length], device=self.device)

    def _bytes(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.uint8, device=self.device)


def _collectives(probe: _Probe, sizes: Sequence[int], bytes_per_s: float) -> dict[str, dict[int, float]]:
    """Seconds by size, smallest first, until one is foreseen to take too long where the slowest pair is so fast."""
    talker = Group(probe.group, probe.device)
    room = torch.zeros(probe.group.size(), max(sizes), dtype=torch.uint8, device=probe.device)
    message = torch.zeros_like(room[0])

    def all_gather(size: int) -> None:
        dist.all_gather([row[:size] for row in room], message[:size], group=probe.group)

    works: dict[str, Callable[[int], Any]] = {
        "all_reduce": lambda size: dist.all_reduce(_floats(message[:size]), group=probe.group),
        "all_gather": all_gather,
        "frames": lambda size: talker.all_gather(message[:size], "frames"),
    }
    try:
        return {name: _times(probe, work, sizes, bytes_per_s) for name, work in works.items()}
    finally:
        talker.let_go()  # the connections, not the group


def _times(probe: _Probe, work: Callable[[int], Any], sizes: Sequence[int], bytes_per_s: float) -> dict[int, float]:
    def seconds(size: int) -> float:
        """Of the rank that took longest, and so the same on all, who start from here together."""
        start = time.perf_counter()
        work(size)
        probe.wait()
        return max(row[0] for row in probe.everyones([time.perf_counter() - start]))

    found: dict[int, float] = {}
    for size in sizes:
        if not found:
            seconds(size)  # opens connections
        else:
            last = max(found)
            in_proportion = found[last] * size / last
            by_rate = found[last] + probe.group.size() * (size - last) / bytes_per_s
            if min(in_proportion, by_rate) > _TOO_LONG_S:
                break
        taken = [seconds(size)]
        while len(taken) < _ROUNDS and sum(taken) < _LONG_ENOUGH_S:
            taken.append(seconds(size))
        found[size] = statistics.median(taken)
    return found


def _floats(message: Tensor) -> Tensor:
    """As what is added up; whole ones of it."""
    return message[: message.numel() // 4 * 4].view(torch.float32)


def _some_pairs(num_ranks: int) -> list[tuple[int, int]]:
    """All of few ranks; of many, neighbours on a ring and those across it."""
    if num_ranks <= _ALL_PAIRS_RANKS:
        return [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    hops = (1, num_ranks // 2)
    return sorted({tuple(sorted((a, (a + hop) % num_ranks))) for a in range(num_ranks) for hop in hops})  # type: ignore[misc]


def _rounds(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in rounds in which no rank is twice; the same on all ranks."""
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        for one in rounds:
            if not set(pair) & {rank for other in one for rank in other}:
                one.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def _measured(
    probe: _Probe, rounds: Sequence[Sequence[tuple[int, int]]], measure: Callable[[int, int], float]
) -> list[float]:
    """What this rank, as a source, measured of each target; 0 where it did not."""
    found = [0.0] * probe.group.size()
    for source, target in (pair for one in rounds for pair in one if probe.rank in pair):
        seen = measure(source, target)
        if probe.rank == source:
            found[target] = seen
    return found


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group takes tensors from: the host, unless it is NCCL's alone."""
    cpu = torch.device("cpu")
    return cpu if backend_for(group, cpu) == "gloo" else torch.device("cuda", torch.cuda.current_device())
