"""A curve in braille characters: two dots across and four down in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # left and right, from above


def braille(values: Sequence[float | None], width: int, height: int, total: int) -> list[str]:
    """`height` lines of `width` characters, of values of which there will be `total`, each line ended by its value.

    What is no number leaves a gap.
    """
    across = 2 * width
    used = min(across, max(1, round(across * len(values) / max(1, total))))
    starts = [i * len(values) // used for i in range(used + 1)]
    columns = [_mean(values[a : max(a + 1, b)]) for a, b in pairwise(starts)]
    seen = [value for value in columns if value is not None]
    if not seen:
        return []
    low, high = min(seen), max(seen)
    down = 4 * height - 1
    cells = [[_BLANK] * width for _ in range(height)]
    before: int | None = None
    for x, value in enumerate(columns):
        if value is None:
            before = None
            continue
        y = round(down * (high - value) / (high - low)) if high > low else down
        # A steep curve stays one line: its column reaches to the dot before.
        for dot in range(min(y, before if before is not None else y), max(y, before if before is not None else y) + 1):
            cells[dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
        before = y
    labels = {0: f" {high:.3g}", height - 1: f" {low:.3g}"}
    return ["".join(map(chr, row)) + labels.get(number, "") for number, row in enumerate(cells)]


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(finite) if finite else None
