"""What the network carries: seconds of a message against its bytes, in the ways that schemes talk."""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

from laconic.errors import LaconicError
from laconic.transport import Collectives

_LONG_ENOUGH_S = 0.8  # of a message, for its rate to be that of long ones
_OFTEN_S = 0.1  # up to which messages are repeated
_SIZES = tuple(1 << power for power in range(13, 27, 2))  # bytes of a worker's message
_REPEATS = 5


@dataclass(frozen=True)
class Messages:
    """How many, and how many equal ones would carry as much: norms, before codes, weigh next to nothing."""

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
        """What of it a faster link would not save."""
        if not messages.long:
            return messages.count * self.latency_s
        sizes = [0, *(size for size, _ in self.ramp)]
        seconds = [0.0, *(extra_s for _, extra_s in self.ramp)]
        ramp_s = float(np.interp(bytes_out / messages.long, sizes, seconds))
        return messages.count * self.latency_s + messages.long * ramp_s


@dataclass(frozen=True)
class LinkCosts:
    """By the way of talking: sums that the backend makes, and frames that go to all."""

    sums: LinkCost
    frames: LinkCost

    @property
    def bits_per_s(self) -> float:
        """What leaves a worker at best."""
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
    found = []
    for size in _SIZES:
        found.append(_timed(transport, talk, size))
        if len(found) > 1 and found[-1][0] > _LONG_ENOUGH_S:
            break
    (before_s, before_bytes), (last_s, last_bytes) = found[-2:]
    rate = (last_bytes - before_bytes) / max(last_s - before_s, 0.05 * last_s)
    ramp = [(num_bytes, max(0.0, seconds - latency_s - num_bytes / rate)) for seconds, num_bytes in found]
    with busy():
        busy_latency_s, _ = _timed(transport, talk, 8)
    return LinkCost(latency_s, max(latency_s, busy_latency_s), rate, tuple(ramp))


def _timed(transport: Collectives, talk: Callable[[Tensor], None], num_bytes: int) -> tuple[float, int]:
    """(median seconds of a message, the same on all workers, bytes that left this one)."""
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    bytes_before, _ = left_so_far(transport)
    found: list[float] = []
    for _ in range(_REPEATS):
        if found and slowest(transport, found[-1]) > _OFTEN_S:
            break  # what takes long varies little
        meet(transport)
        start = time.perf_counter()
        talk(message)
        found.append(time.perf_counter() - start)
    bytes_after, _ = left_so_far(transport)
    return slowest(transport, statistics.median(found)), (bytes_after - bytes_before).total() // len(found)


def left_so_far(transport: Collectives) -> tuple[Counter[str], Counter[str]]:
    """What has left this worker, meetings aside: bytes and messages by kind."""
    by_kind = {kind: count for kind, count in transport.traffic.by_kind.items() if kind != "meeting"}
    return (
        Counter({kind: count.bytes_out for kind, count in by_kind.items()}),
        Counter({kind: count.messages for kind, count in by_kind.items()}),
    )


def meet(transport: Collectives) -> None:
    """Begin at once."""
    transport.all_reduce_(torch.zeros(1), "meeting")


def slowest(transport: Collectives, mine: float) -> float:
    """The largest of everyone's numbers, on all of them."""
    rows = transport.gather_small(torch.tensor([mine], dtype=torch.float64).view(torch.uint8))
    return float(rows.contiguous().view(torch.float64).max())


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
