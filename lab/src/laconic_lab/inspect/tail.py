"""The share of entries beyond each magnitude, for a drawing."""

from __future__ import annotations

from torch import Tensor

from laconic_lab.inspect.fit import magnitudes, sample

_POINTS = 48


def tail(x: Tensor) -> list[tuple[float, float]]:
    """(t / mean|x|, share of entries with |x| >= t) at about 48 ranks, spaced evenly on a logarithmic scale.

    Ascending in t; zeros have no place there, so a tensor of zeros has no tail.
    """
    size = magnitudes(x)
    descending = sample(size).flip(0)
    m = descending.numel()
    if m == 0 or float(descending[0]) == 0:
        return []
    ranks = sorted({round(m ** (i / (_POINTS - 1))) for i in range(_POINTS)}, reverse=True)
    found = [(float(descending[rank - 1]), rank / m) for rank in ranks]
    unit = float(size.mean())
    return [(t / unit, share) for t, share in found if t > 0]
