"""Rates of links as text."""

import re
from decimal import Decimal

from laconic.errors import LaconicError

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
