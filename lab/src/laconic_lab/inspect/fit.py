"""The fit of a Laplace and a Gaussian law to the entries of a tensor: a diagnostic, never on the path of a step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic_lab.errors import TaskError

# The distance to the true law is about 0.9/sqrt(m) by chance alone, to the other about 0.2: of true Laplace samples
# of 20 entries 63 % lie closer to the Laplace, of 64 84 %, of 128 95 %.
FEWEST = 64
_LARGEST_SAMPLE = 1_000_000
_SEED = 0

_POINTS = 48


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One tensor against Laplace(0, b) and Gaussian(0, sigma), and the threshold that the Laplace foretells.

    What cannot be said is None: distances where every entry is zero or none is a number, thresholds also where all
    entries go (k = N).
    """

    entries: int  # N: those that are numbers
    non_finite: int  # Inf and NaN, left out of everything else
    zeros: int
    mean_abs: float  # mean |x|, the Laplace's b by maximum likelihood
    rms: float  # root of mean x^2, the Gaussian's sigma by maximum likelihood
    w1_laplace: float | None  # in units of mean |x|
    w1_gaussian: float | None
    k: int  # max(1, round(rho*N))
    threshold: float | None  # t0 = b * ln(N/k)
    exact_threshold: float | None  # the k-th largest |x|
    caught: int | None  # entries with |x| >= t0; k of them were wanted

    @property
    def closer(self) -> str | None:
        """The law at the smaller distance; None where there is none, or too few entries to tell."""
        if self.w1_laplace is None or self.w1_gaussian is None or self.entries < FEWEST:
            return None
        return "laplace" if self.w1_laplace <= self.w1_gaussian else "gaussian"

    @property
    def threshold_ratio(self) -> float | None:
        """t0 over the exact threshold: above 1 too few entries are caught, below 1 too many."""
        return self.threshold / self.exact_threshold if self.threshold is not None and self.exact_threshold else None

    @property
    def caught_ratio(self) -> float | None:
        """The entries that t0 catches over those that were wanted."""
        return None if self.caught is None else self.caught / self.k

    def as_dict(self) -> dict[str, Any]:
        """Every figure, the derived ones too."""
        derived = {name: getattr(self, name) for name in ("closer", "threshold_ratio", "caught_ratio")}
        return {**asdict(self), **derived}


def fit(x: Tensor, rho: float) -> Fit:
    """Fit both laws to the entries of x, and foretell the threshold of its k = max(1, round(rho*N)) largest.

    P(|x| > t) is exp(-t/b) under the Laplace and erfc(t / (sigma*sqrt(2))) under the Gaussian. The distance is
    Wasserstein-1 between |x| and the law's magnitude, from quantiles:

        W1 = mean over i of | |x|_(i) - F^-1((i - 0.5)/m) | / mean|x|
        F^-1(u) = -b * ln(1 - u)   or   sigma * sqrt(2) * erfinv(u)

    Magnitudes, because a selection sees nothing else; for a sample symmetric about 0 it is the distance of the signed
    values too. Sums are float64 whatever the type of x. Above a million entries W1 is that of a random million, drawn
    with one seed; all else is of every entry. The estimate t0 is that of Chen, Liu, Han (J. ZJU Eng. 2021).
    """
    if not 0 < rho <= 1:
        raise TaskError(f"rho is {rho}; give a share in (0, 1]")
    size = magnitudes(x)
    n = size.numel()
    b, sigma = (float(size.mean()), float(size.square().mean().sqrt())) if n else (0.0, 0.0)
    k = min(n, max(1, round(rho * n)))
    w1_laplace, w1_gaussian = _distances(sample(size), b, sigma) if b > 0 else (None, None)
    t0 = b * math.log(n / k) if b > 0 and k < n else None
    return Fit(
        entries=n,
        non_finite=x.numel() - n,
        zeros=n - int(size.count_nonzero()),
        mean_abs=b,
        rms=sigma,
        w1_laplace=w1_laplace,
        w1_gaussian=w1_gaussian,
        k=k,
        threshold=t0,
        exact_threshold=None if t0 is None else float(size.kthvalue(n - k + 1).values),
        caught=None if t0 is None else int((size >= t0).sum()),
    )


def magnitudes(x: Tensor) -> Tensor:
    """|x| of the entries that are numbers, flat, on the CPU in float64: squares of tiny gradients vanish in less."""
    flat = x.detach().reshape(-1).to("cpu", torch.float64).abs()
    return flat[flat.isfinite()]


def sample(size: Tensor) -> Tensor:
    """The magnitudes in ascending order: all, or a million of them, the same in every call."""
    if size.numel() > _LARGEST_SAMPLE:
        # Drawn, not every n-th: the entries of a layer repeat by rows.
        draw = torch.Generator().manual_seed(_SEED)
        size = size[torch.randint(size.numel(), (_LARGEST_SAMPLE,), generator=draw)]
    return torch.from_numpy(np.sort(size.numpy()))  # ten times faster than torch's, with AVX-512


def _distances(ascending: Tensor, b: float, sigma: float) -> tuple[float, float]:
    """Wasserstein-1 to the Laplace and to the Gaussian, in units of b."""
    m = ascending.numel()
    u = (torch.arange(m, dtype=torch.float64) + 0.5) / m
    laplace = -b * torch.log1p(-u)
    gaussian = sigma * math.sqrt(2) * torch.erfinv(u)
    return float((ascending - laplace).abs().mean() / b), float((ascending - gaussian).abs().mean() / b)


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
    places = [(float(descending[rank - 1]), rank / m) for rank in ranks]
    unit = float(size.mean())
    return [(t / unit, share) for t, share in places if t > 0]
