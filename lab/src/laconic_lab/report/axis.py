"""Axes: values to places, and the round numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """place = start + (f(value) - f(lo)) / (f(hi) - f(lo)) (end - start), where f is the identity or the logarithm."""

    name: str
    lo: float
    hi: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Where a value lies, in the units of the drawing."""
        f = math.log10 if self.is_log else float
        return self.start + (f(value) - f(self.lo)) / (f(self.hi) - f(self.lo)) * (self.end - self.start)


def linear(name: str, values: Sequence[float], start: float, end: float, form: Callable[[float], str]) -> Axis:
    """An axis from one round number to another, around all values."""
    step = _round_step(min(values), max(values))
    first = math.floor(min(values) / step + 1e-9)
    last = math.ceil(max(values) / step - 1e-9)
    last = max(last, first + 1)
    ticks = tuple((i * step, form(round(i * step, 12))) for i in range(first, last + 1))
    return Axis(name, first * step, last * step, start, end, False, ticks)


def logarithmic(name: str, values: Sequence[float], start: float, end: float, form: Callable[[float], str]) -> Axis:
    """An axis a little wider than all values, which are above 0."""
    margin = (max(values) / min(values)) ** 0.03 if max(values) > min(values) else 2
    lo = min(values) / margin
    hi = max(values) * margin
    ticks: list[float] = []
    for mantissas in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        decades = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
        ticks = [m * 10.0**d for d in decades for m in mantissas if lo <= m * 10.0**d <= hi]
        if len(ticks) >= 4:
            break
    return Axis(name, lo, hi, start, end, True, tuple((tick, form(float(f"{tick:.6g}"))) for tick in ticks))


def _round_step(lo: float, hi: float, steps: int = 6) -> float:
    """The smallest of 1, 2, 5, 10, ... that cuts the span into at most so many steps."""
    span = hi - lo or abs(hi) or 1.0
    decade = 10.0 ** math.floor(math.log10(span / steps))
    return next(m * decade for m in (1, 2, 5, 10) if span <= steps * m * decade * (1 + 1e-9))
