"""The network measured: seconds of a message against its bytes, as schemes send them, and between pairs."""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from decimal import Decimal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import LaconicError
from laconic.transport import Collectives, place_of_texts, rows_of

_LONG_ENOUGH_S = 0.8  # of a message, for its rate to be that of long ones
_OFTEN_S = 0.1  # up to which messages are repeated
_SIZES = tuple(1 << power for power in range(13, 27, 2))  # bytes of a worker's message
_REPEATS = 5
# Of pairs:
_ALL_PAIRS_RANKS = 8  # beyond, 28 pairs become too many
_ECHOES = 9
_ECHOES_S = 0.3  # after which so many echoes are enough, though at least one is timed
FIRST_BYTES = 1 << 14
MOST_BYTES = 1 << 24
_GROWTH = 4
_TRANSFER_S = 0.1  # a transfer so long is told from latency
_STARTING = 4  # round trips, in whose time TCP may still be opening its window
PAIRS_S = 6.0  # for all pairs together; a round that has begun is ended


@dataclass(frozen=True)
class Messages:
    """A number of messages, and how many equal ones would carry as much: norms, before codes, weigh next to nothing."""

    count: float = 1.0
    long: float = 1.0

    def __mul__(self, times: float) -> "Messages":
        return Messages(self.count * times, self.long * times)


_ONE = Messages()


@dataclass(frozen=True)
class LinkCost:
    """Seconds of a message = latency_s + ramp(bytes) + bytes that leave a worker / bytes_per_s.

    The ramp is what TCP takes on a long link until it sends at the full rate, and a ring for its hops.
    """

    latency_s: float
    busy_latency_s: float  # where all workers compute meanwhile
    bytes_per_s: float
    ramp: tuple[tuple[int, float], ...] = ()  # (bytes, seconds), ascending

    def seconds(self, bytes_out: float, messages: Messages = _ONE) -> float:
        """Of messages that come to so many bytes."""
        return self.fixed_s(bytes_out, messages) + bytes_out / self.bytes_per_s

    def fixed_s(self, bytes_out: float, messages: Messages = _ONE) -> float:
        """The part of it that a faster link would not save."""
        if not messages.long:
            return messages.count * self.latency_s
        sizes = [0, *(size for size, _ in self.ramp)]
        seconds = [0.0, *(extra_s for _, extra_s in self.ramp)]
        ramp_s = float(np.interp(bytes_out / messages.long, sizes, seconds))
        return messages.count * self.latency_s + messages.long * ramp_s


@dataclass(frozen=True)
class LinkCosts:
    """The costs of both kinds of exchange: sums that the backend makes, and frames that go to all."""

    sums: LinkCost
    frames: LinkCost

    @property
    def bits_per_s(self) -> float:
        """The rate at which bits leave a worker at best."""
        return 8 * max(self.sums.bytes_per_s, self.frames.bytes_per_s)

    def at(self, bits_per_s: float) -> "LinkCosts":
        """The same network with links of another rate, as well used as these."""
        factor = bits_per_s / self.bits_per_s
        return LinkCosts(
            replace(self.sums, bytes_per_s=factor * self.sums.bytes_per_s),
            replace(self.frames, bytes_per_s=factor * self.frames.bytes_per_s),
        )


def measure_link_costs(transport: Collectives, busy: Callable[[], AbstractContextManager[None]]) -> LinkCosts:
    """The links of all workers at once, as a step uses them; a call that all of them make.

    Inside `busy()` this worker computes, as it does in a backward pass.
    """

    def add(message: Tensor) -> None:
        transport.sum_gradients_(message.view(torch.float32), "measured")  # as a scheme's sums go

    def gather(message: Tensor) -> None:
        transport.all_gather(message, "measured")

    with transport.traffic.uncounted():
        return LinkCosts(_measured(transport, add, busy), _measured(transport, gather, busy))


def _measured(
    transport: Collectives, talk: Callable[[Tensor], None], busy: Callable[[], AbstractContextManager[None]]
) -> LinkCost:
    """The latency of next to nothing, the rate from one long message to a longer one, and how it is reached."""
    talk(torch.zeros(8, dtype=torch.uint8))  # connections are opened with the first
    latency_s, _ = _timed(transport, talk, 8)
    timings = []
    for size in _SIZES:
        timings.append(_timed(transport, talk, size))
        if len(timings) > 1 and timings[-1][0] > _LONG_ENOUGH_S:
            break
    (before_s, before_bytes), (last_s, last_bytes) = timings[-2:]
    rate = (last_bytes - before_bytes) / max(last_s - before_s, 0.05 * last_s)
    ramp = [(num_bytes, max(0.0, seconds - latency_s - num_bytes / rate)) for seconds, num_bytes in timings]
    with busy():
        busy_latency_s, _ = _timed(transport, talk, 8)
    return LinkCost(latency_s, max(latency_s, busy_latency_s), rate, tuple(ramp))


def _timed(transport: Collectives, talk: Callable[[Tensor], None], num_bytes: int) -> tuple[float, int]:
    """(median seconds of a message, the same on all workers, bytes that left this one)."""
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    bytes_before, _ = left_so_far(transport)
    times_s: list[float] = []
    for _ in range(_REPEATS):
        if times_s and slowest(transport, times_s[-1]) > _OFTEN_S:
            break  # what takes long varies little
        meet(transport)
        start = time.perf_counter()
        talk(message)
        times_s.append(time.perf_counter() - start)
    bytes_after, _ = left_so_far(transport)
    return slowest(transport, statistics.median(times_s)), (bytes_after - bytes_before).total() // len(times_s)


def left_so_far(transport: Collectives) -> tuple[Counter[str], Counter[str]]:
    """Bytes and messages that have left this worker, by kind, meetings aside."""
    by_kind = {kind: count for kind, count in transport.traffic.by_kind.items() if kind != "meeting"}
    return (
        Counter({kind: count.bytes_out for kind, count in by_kind.items()}),
        Counter({kind: count.messages for kind, count in by_kind.items()}),
    )


def meet(transport: Collectives) -> None:
    """Begin at once."""
    transport.all_reduce_(torch.zeros(1), "meeting")


def slowest(transport: Collectives, own: float) -> float:
    """The largest of everyone's numbers, on all of them."""
    return max(number for (number,) in rows_of(transport, [own]))


@dataclass(frozen=True)
class PairLink:
    """The link from one rank to another."""

    source: int
    target: int
    latency_s: float  # half of the round trip of 8 bytes
    bytes_per_s: float  # of the longest message that there was time for
    settled: bool = True  # whether it was long enough for TCP; else the link may carry more


@dataclass(frozen=True)
class EchoTimes:
    """The knowledge that a source has of a target from short messages both ways."""

    round_trip_s: float  # the median
    ahead_s: float  # the target's clock, by the shortest of them
    error_s: float  # half of the shortest


def measure_pairs(group: dist.ProcessGroup, pairs: Iterable[tuple[int, int]] | None = None) -> tuple[PairLink, ...]:
    """Latency and rate between pairs of ranks, both ways: the same on all ranks, who all make this call.

    Without `pairs`, all of up to 8 ranks, and some of more. Pairs that share no rank are measured at once, as a
    collective uses them. After some seconds no more are begun: on slow links the last pairs are left out.
    """
    probe = PairProbe(group)
    rounds = rounds_of(some_pairs(group.size()) if pairs is None else pairs)
    start = time.perf_counter()
    most_s = PAIRS_S / max(1, 2 * len(rounds))
    links: list[PairLink] = []
    for one in rounds:
        begun = time.perf_counter()
        own = next((probe.link(*pair, most_s) for pair in one if probe.rank in pair), None)
        now = time.perf_counter()
        rows = probe.everyones([now - start, now - begun, *(astuple(own) if own else [-1.0] * 5)])
        links += [
            PairLink(int(source), int(target), latency_s, bytes_per_s, bool(settled))
            for _, _, source, target, latency_s, bytes_per_s, settled in rows
            if source >= 0
        ]
        if max(row[0] for row in rows) + max(row[1] for row in rows) > PAIRS_S:
            break
    return tuple(sorted(links, key=lambda link: (link.source, link.target)))


class PairProbe:
    """One rank's end of the measuring: messages to and from a peer, waited for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self._group = group
        self._device = place_of_texts(group)

    def echo(self, source: int, target: int) -> EchoTimes | None:
        """A call of both, of which the source decides how often; None at the target."""
        if self.rank == target:
            while self._number_from(source):
                self._tell(time.time(), source)
            self._tell(time.time(), source)
            return None
        seen: list[EchoTimes] = []
        going = True
        while going:
            spent_s = sum(echo.round_trip_s for echo in seen)
            going = not seen or (len(seen) < _ECHOES and spent_s < _ECHOES_S)
            before = time.time()
            start = time.perf_counter()
            self._tell(going, target)
            theirs = self._number_from(target)
            round_trip_s = time.perf_counter() - start
            seen.append(EchoTimes(round_trip_s, theirs - (before + round_trip_s / 2), round_trip_s / 2))
        timed = seen[1:]  # in the first the target may have been elsewhere
        shortest = min(timed, key=lambda echo: echo.round_trip_s)
        return replace(shortest, round_trip_s=statistics.median(echo.round_trip_s for echo in timed))

    def link(self, a: int, b: int, most_s: float) -> PairLink:
        """The link from this rank, one of the two, to the other; a call of both."""
        seen = self.echo(a, b)
        if seen is not None:
            round_trip_s = seen.round_trip_s
            self._tell(round_trip_s, b)
        else:
            round_trip_s = self._number_from(a)
        links = [self._rate(source, target, round_trip_s, most_s) for source, target in ((a, b), (b, a))]
        return next(link for link in links if link is not None)

    def _rate(self, source: int, target: int, round_trip_s: float, most_s: float) -> PairLink | None:
        """The rate by what a message takes beyond a short one; a call of both, None at the target.

        Each is four times as long as the one before, and its first byte says whether another follows: the source
        sends no more where there is no time for another, or where this one is foreseen to take long enough.
        """
        length = FIRST_BYTES
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
                length >= MOST_BYTES
                or foreseen_s > _TRANSFER_S + opening_s
                or time.perf_counter() + this_and_next_s > end
            )
            message = self._bytes(length)
            message[0] = not is_last
            start = time.perf_counter()
            self._send(message, target)
            self._receive_(self._bytes(1), target)
            taken_s = max(time.perf_counter() - start - round_trip_s, 1e-6)
            if is_last:
                settled = length >= MOST_BYTES or taken_s > opening_s
                return PairLink(source, target, round_trip_s / 2, length / taken_s, settled)
            length *= _GROWTH

    def everyones(self, own: Sequence[float]) -> list[list[float]]:
        """The numbers of each rank, by rank; nobody has them before all are here."""
        row = torch.tensor(own, dtype=torch.float64, device=self._device)
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


def some_pairs(num_ranks: int) -> list[tuple[int, int]]:
    """All of few ranks; of many, neighbours on a ring and those across it."""
    if num_ranks <= _ALL_PAIRS_RANKS:
        return [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    hops = (1, num_ranks // 2)
    return sorted({tuple(sorted((a, (a + hop) % num_ranks))) for a in range(num_ranks) for hop in hops})  # type: ignore[misc]


def rounds_of(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
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


_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3}


def rate_text(bits_per_s: float) -> str:
    """A rate as it is written for links, in three digits."""
    unit = next((unit for unit, size in _UNITS.items() if bits_per_s >= size), "kbit")
    return f"{bits_per_s / _UNITS[unit]:.3g}{unit}"


def parse_rate(text: str) -> int:
    """The bits per second of a text like 10mbit, 2.5gbit or 500kbit."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", text)
    if match is None:
        raise LaconicError(f"{text!r} is no rate; write one like 10mbit, 2.5gbit or 500kbit")
    return int(Decimal(match[1]) * _UNITS[match[2]])
