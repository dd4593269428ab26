"""What one rank's messages to another take, by the backend that training uses, in a bounded time."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.transport import place_of_texts

_ALL_PAIRS_RANKS = 8  # beyond, 28 pairs become too many
_ECHOES = 9
_ECHOES_S = 0.3  # after which so many echoes are enough, though at least one is timed
_FIRST_BYTES = 1 << 14
_MOST_BYTES = 1 << 24
_GROWTH = 4
_LONG_ENOUGH_S = 0.1  # a transfer so long is told from latency
_STARTING = 4  # round trips, in whose time TCP may still be opening its window
_PAIRS_S = 6.0  # for all pairs together; a round that has begun is ended


@dataclass(frozen=True)
class PairLink:
    """What one rank sends to another."""

    source: int
    target: int
    latency_s: float  # half of the round trip of 8 bytes
    bytes_per_s: float  # of the longest message that there was time for
    settled: bool = True  # whether it was long enough for TCP; else the link may carry more


@dataclass(frozen=True)
class EchoTimes:
    """What a source knows of a target from short messages there and back."""

    round_trip_s: float  # the median
    ahead_s: float  # the target's clock, by the shortest of them
    error_s: float  # half of the shortest


def measure_pairs(group: dist.ProcessGroup, pairs: Iterable[tuple[int, int]] | None = None) -> tuple[PairLink, ...]:
    """Latency and rate between pairs of ranks, both ways: the same on all ranks, who all make this call.

    Without `pairs`, all of up to 8 ranks, and some of more. Pairs that share no rank are measured at once, as a
    collective uses them. After some seconds no more are begun: on slow links the last pairs are left out.
    """
    probe = PairProbe(group)
    rounds = _rounds(_some_pairs(group.size()) if pairs is None else pairs)
    start = time.perf_counter()
    most_s = _PAIRS_S / max(1, 2 * len(rounds))
    found: list[PairLink] = []
    for one in rounds:
        begun = time.perf_counter()
        mine = next((probe.link(*pair, most_s) for pair in one if probe.rank in pair), None)
        now = time.perf_counter()
        rows = probe.everyones([now - start, now - begun, *(astuple(mine) if mine else [-1.0] * 5)])
        found += [
            PairLink(int(source), int(target), latency_s, bytes_per_s, bool(settled))
            for _, _, source, target, latency_s, bytes_per_s, settled in rows
            if source >= 0
        ]
        if max(row[0] for row in rows) + max(row[1] for row in rows) > _PAIRS_S:
            break
    return tuple(sorted(found, key=lambda link: (link.source, link.target)))


class PairProbe:
    """One rank's end of the measuring: messages to and from a peer, waited for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self._group = group
        self._device = place_of_texts(group)

    def echo(self, source: int, target: int, clock: Callable[[], float] = time.time) -> EchoTimes | None:
        """A call of both, of which the source decides how often; None at the target."""
        if self.rank == target:
            while self._number_from(source):
                self._tell(clock(), source)
            self._tell(clock(), source)
            return None
        seen: list[EchoTimes] = []
        going = True
        while going:
            spent_s = sum(echo.round_trip_s for echo in seen)
            going = not seen or (len(seen) < _ECHOES and spent_s < _ECHOES_S)
            before = clock()
            start = time.perf_counter()
            self._tell(going, target)
            theirs = self._number_from(target)
            round_trip_s = time.perf_counter() - start
            seen.append(EchoTimes(round_trip_s, theirs - (before + round_trip_s / 2), round_trip_s / 2))
        timed = seen[1:]  # in the first the target may have been elsewhere
        shortest = min(timed, key=lambda echo: echo.round_trip_s)
        return replace(shortest, round_trip_s=statistics.median(echo.round_trip_s for echo in timed))

    def link(self, a: int, b: int, most_s: float) -> PairLink:
        """What this rank, which is one of them, sends to the other; a call of both."""
        seen = self.echo(a, b)
        if seen is not None:
            round_trip_s = seen.round_trip_s
            self._tell(round_trip_s, b)
        else:
            round_trip_s = self._number_from(a)
        ways = [self._rate(source, target, round_trip_s, most_s) for source, target in ((a, b), (b, a))]
        return next(way for way in ways if way is not None)

    def _rate(self, source: int, target: int, round_trip_s: float, most_s: float) -> PairLink | None:
        """By what a message takes beyond a short one; a call of both, None at the target.

        Each is four times as long as the one before, and its first byte says whether another follows: the source
        sends no more where there is no time for another, or where this one is foreseen to take long enough.
        """
        length = _FIRST_BYTES
        if self.rank == target:
            while self._receive_(self._bytes(length), source)[0].item():
                self._send(self._bytes(1), source)
                length *= _GROWTH
            self._send(self._bytes(1), source)
            return None
        end = time.perf_counter() + most_s
        opening_s = _STARTING * round_trip_s
        taken_s = 0.0  # by the message before, beyond a round trip
        while True:
            foreseen_s = _GROWTH * taken_s
            this_and_next_s = 2 * round_trip_s + (1 + _GROWTH) * foreseen_s
            is_last = (
                length >= _MOST_BYTES
                or foreseen_s > _LONG_ENOUGH_S + opening_s
                or time.perf_counter() + this_and_next_s > end
            )
            message = self._bytes(length)
            message[0] = not is_last
            start = time.perf_counter()
            self._send(message, target)
            self._receive_(self._bytes(1), target)
            taken_s = max(time.perf_counter() - start - round_trip_s, 1e-6)
            if is_last:
                settled = length >= _MOST_BYTES or taken_s > opening_s
                return PairLink(source, target, round_trip_s / 2, length / taken_s, settled)
            length *= _GROWTH

    def everyones(self, mine: Sequence[float]) -> list[list[float]]:
        """What each rank says, by rank; nobody has it before all are here."""
        row = torch.tensor(mine, dtype=torch.float64, device=self._device)
        rows = [torch.empty_like(row) for _ in range(self._group.size())]
        dist.all_gather(rows, row, group=self._group)
        return [other.tolist() for other in rows]

    def _tell(self, number: float, peer: int) -> None:
        self._send(torch.tensor([number], dtype=torch.float64, device=self._device), peer)

    def _number_from(self, peer: int) -> float:
        return self._receive_(torch.zeros(1, dtype=torch.float64, device=self._device), peer).item()

    def _send(self, message: Tensor, peer: int) -> None:
        dist.send(message, group=self._group, group_dst=peer)

    def _receive_(self, message: Tensor, peer: int) -> Tensor:
        """Overwrite `message` with what the peer sends."""
        dist.recv(message, group=self._group, group_src=peer)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        return message

    def _bytes(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=torch.uint8, device=self._device)


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
