"""The specification of a lab: how many hosts, on which links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from laconic.planning import parse_rate
from laconic_lab.errors import LabError, LaconicError

_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3}
_MAX_BITS_PER_S = 8 * (2**32 - 1)  # the field of a token bucket's rate has 32 bits
_MAX_DELAY_S = 10.0
_MAX_SEGMENTS = 45  # of 1448 bytes in the 64 kB of one packet of IP
_MOST_SLOWDOWN = 1000
_MAX_HOSTS = 250  # one address each in 10.77.0.0/24

# A burst leaves at once after a pause, so it is time that the link gives away: 1 ms of the rate, and two packets at
# least. At 1gbit that is 125 kB, and the 64 kB packets of segmentation offload pass whole (11 % of 2 cores instead of
# 55 %); at lower rates the kernel cuts what exceeds it into packets of 1514 bytes.
_BURST_S = 1e-3
_BURST_MIN_BYTES = 2 * 1514
# Three hosts that send 2 MB each to a fourth need 50 ms of queue, or losses double the time (1gbit: 50 ms instead of
# 230 with 256 kB). At 10mbit, 128 kB is the least that takes two 64 kB packets, and 512 kB would time TCP out.
_QUEUE_S = 50e-3
_QUEUE_MIN_BYTES = 128 * 1024


@dataclass(frozen=True)
class Link:
    """A host's cable, the same both ways, of which each way has half of the delay and of the loss.

    Two hosts on such links are so far apart, and so much is lost, one way between them.
    """

    bits_per_s: int | None = None  # None is as fast as the machine
    delay_s: float = 0.0
    jitter_s: float = 0.0  # the most that a packet's delay may be off; none overtakes another
    loss: float = 0.0  # the share of packets of the MTU that never arrive

    def __post_init__(self) -> None:
        if self.bits_per_s is not None and self.bits_per_s < 1000:
            raise LabError(f"a link of {self.bits_per_s} bits per second is too slow; give 1kbit or more")
        if self.bits_per_s is not None and self.bits_per_s > _MAX_BITS_PER_S:
            raise LabError(f"a link of {self.bits_per_s} bits per second cannot be made; give up to 34gbit, or none")
        if self.delay_s > _MAX_DELAY_S:
            raise LabError(f"a delay of {self.delay_s:g} s is too long; give {_MAX_DELAY_S:g}s or less")
        if self.jitter_s > self.delay_s:
            raise LabError("a jitter above the delay would send packets into the past; give a longer delay, or less")
        if self.loss >= 1:
            raise LabError("a link that loses everything is cut; give a loss below 100%, or `laconic lab cut HOST`")

    @classmethod
    def parse(cls, text: str) -> Link:
        """The link of a text like 10mbit, 500kbit, none, or 50mbit,delay=20ms,jitter=2ms,loss=0.1%."""
        rate, *more = text.split(",")
        given = dict(pair.split("=", 1) for pair in more if "=" in pair)
        if len(given) < len(more) or not given.keys() <= {"delay", "jitter", "loss"}:
            raise LabError(f"{text!r} is no link; write one like 50mbit,delay=20ms,jitter=2ms,loss=0.1%")
        seconds = {f"{name}_s": parse_seconds(given[name]) for name in ("delay", "jitter") if name in given}
        try:
            bits_per_s = None if rate == "none" else parse_rate(rate)
        except LaconicError:
            raise LabError(f"{rate!r} is no link; write one like 10mbit, 2.5gbit or 500kbit, or none") from None
        return cls(bits_per_s, loss=parse_loss(given.get("loss", "0%")), **seconds)

    def __str__(self) -> str:
        words = ["none"]
        if self.bits_per_s is not None:
            unit, scale = next((unit, scale) for unit, scale in _UNITS.items() if self.bits_per_s >= scale)
            words = [f"{self.bits_per_s / scale:.12g}{unit}"]
        times = {"delay": self.delay_s, "jitter": self.jitter_s}
        words += [f"{name}={value * 1e3:.12g}ms" for name, value in times.items() if value]
        words += [f"loss={self.loss * 100:.12g}%"] * (self.loss > 0)
        return ",".join(words)

    @property
    def is_plain(self) -> bool:
        """Whether it has a rate at most: neither delay nor loss."""
        return not (self.delay_s or self.loss)

    @property
    def max_segments(self) -> int | None:
        """The packets of the MTU that may travel as one, so that a token bucket need not cut them; None: any."""
        return None if self.bits_per_s is None else min(int(self.queue["burst"]) // 1514, _MAX_SEGMENTS)

    @property
    def loss_each_way(self) -> float:
        """The share of packets lost on either way of either end's link: two of them lose what the link says."""
        return 1 - math.sqrt(1 - self.loss)

    @property
    def queue(self) -> dict[str, str | int]:
        """The queue at either end of the link, in tc's words; its rate is in bytes per second."""
        if self.bits_per_s is None:
            # Not shaped, but counted like the others; as fast as no queue (15 Gbit/s).
            return {"kind": "pfifo", "limit": 10000}
        return {
            "kind": "tbf",
            "rate": self.bits_per_s // 8,
            "burst": max(_BURST_MIN_BYTES, round(self.bits_per_s / 8 * _BURST_S)),
            "limit": max(_QUEUE_MIN_BYTES, round(self.bits_per_s / 8 * _QUEUE_S)),
        }


NETWORKS = {  # links as one meets them, to be told from each other; one way between two hosts
    "lan": Link(10**9, delay_s=0.2e-3),
    "campus": Link(10**9, delay_s=2e-3, jitter_s=0.2e-3),
    "wan": Link(200 * 10**6, delay_s=20e-3, jitter_s=1e-3, loss=1e-4),
    "home": Link(50 * 10**6, delay_s=15e-3, jitter_s=3e-3, loss=1e-3),
    "satellite": Link(20 * 10**6, delay_s=300e-3, jitter_s=10e-3, loss=5e-3),
}


def parse_seconds(text: str) -> float:
    """The seconds of a text like 20ms, 0.5s or 200us."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text)
    if match is None:
        raise LabError(f"{text!r} is no time; write one like 20ms, 0.5s or 200us")
    return float(Decimal(match[1]) * {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}[match[2]])


def parse_loss(text: str) -> float:
    """The share of a text like 0.1%."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if match is None:
        raise LabError(f"{text!r} is no loss; write one like 0.1%")
    return float(Decimal(match[1]) / 100)


@dataclass(frozen=True)
class LabSpec:
    """`hosts` hosts on `link` each, but for those that `link_of` names; those of `slow_of` compute more slowly.

    A job's worker on a host of slowdown F sleeps after each step for F - 1 times the CPU seconds that it took. Other
    commands find F in LACONIC_SLOWDOWN.
    """

    hosts: int
    link: Link = Link()
    link_of: Mapping[int, Link] = field(default_factory=dict)
    slow_of: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= _MAX_HOSTS:
            raise LabError(f"a lab of {self.hosts} hosts cannot be made; give 1 to {_MAX_HOSTS}")
        for what, given in (("link", self.link_of), ("slowdown", self.slow_of)):
            for index in given:
                if not 0 <= index < self.hosts:
                    raise LabError(f"a {what} is given for host {index}, but the hosts are 0 to {self.hosts - 1}")
        for index, slowdown in self.slow_of.items():
            if not 1 <= slowdown <= _MOST_SLOWDOWN:
                raise LabError(f"host {index} cannot be {slowdown:g} times slower; give 1 to {_MOST_SLOWDOWN}")

    @property
    def links(self) -> tuple[Link, ...]:
        """The link of every host."""
        return tuple(self.link_of.get(index, self.link) for index in range(self.hosts))

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """How many times slower every host computes."""
        return tuple(self.slow_of.get(index, 1.0) for index in range(self.hosts))
