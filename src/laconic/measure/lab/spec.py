"""What a lab is asked to be: how many hosts, on which links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from laconic.errors import LabError

_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3}
_MAX_BITS_PER_S = 8 * (2**32 - 1)  # the field of a token bucket's rate has 32 bits
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
    """A host's cable, the same both ways; None is as fast as the machine."""

    bits_per_s: int | None

    def __post_init__(self) -> None:
        if self.bits_per_s is not None and self.bits_per_s < 1000:
            raise LabError(f"a link of {self.bits_per_s} bits per second is too slow; give 1kbit or more")
        if self.bits_per_s is not None and self.bits_per_s > _MAX_BITS_PER_S:
            raise LabError(f"a link of {self.bits_per_s} bits per second cannot be made; give up to 34gbit, or none")

    @classmethod
    def parse(cls, text: str) -> Link:
        """The link of a text like 10mbit, 2.5gbit, 500kbit or none."""
        if text == "none":
            return cls(None)
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", text)
        if match is None:
            raise LabError(f"{text!r} is no link; write a rate like 10mbit, 2.5gbit or 500kbit, or none")
        return cls(int(Decimal(match[1]) * _UNITS[match[2]]))

    def __str__(self) -> str:
        if self.bits_per_s is None:
            return "none"
        unit, scale = next((unit, scale) for unit, scale in _UNITS.items() if self.bits_per_s >= scale)
        return f"{self.bits_per_s / scale:.12g}{unit}"

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


@dataclass(frozen=True)
class LabSpec:
    """`hosts` hosts on `link` each, but for those that `link_of` names."""

    hosts: int
    link: Link = Link(None)
    link_of: Mapping[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= _MAX_HOSTS:
            raise LabError(f"a lab of {self.hosts} hosts cannot be made; give 1 to {_MAX_HOSTS}")
        for index in self.link_of:
            if not 0 <= index < self.hosts:
                raise LabError(f"a link is given for host {index}, but the hosts are 0 to {self.hosts - 1}")

    @property
    def links(self) -> tuple[Link, ...]:
        """The link of every host."""
        return tuple(self.link_of.get(index, self.link) for index in range(self.hosts))
