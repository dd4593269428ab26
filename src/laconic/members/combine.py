"""One drift of those of all members, of whom some may lie: the mean, or a rule that a third of them cannot lead astray.

Every rule but `trimmed` is a weighted sum of rows, whose weights follow from the rows' inner products alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import SchemeError

_RULES = ("mean", "clipped", "median", "trimmed")
_MIXES = ("", "pairs", "near")
_CHUNK = 1 << 15  # columns at a time: those of eight rows stay in a core's cache
_LONGEST = 10.0  # median lengths; longer rows are shortened to that first, or they would drown the others in rounding
_FAR = 3.0  # radii; who is farther from the centre is left out
_NUM_CENTRES = 3  # that `clipped` tries, each the result of the one before
_MOST_ITERATIONS = 50  # of Weiszfeld
_SMOOTH = 1e-6  # of the largest distance: the least that a row is divided by
_STILL = 1e-4  # a change of weights that ends the iterations
_TINY = 1e-30


@dataclass(frozen=True)
class Combined:
    """D, and how much of each row is in it: mean = D + sum of weight * what was clipped of a row."""

    drift: Tensor
    shares: list[float]  # of a row's weight in the plain mean; 1: nothing was clipped
    clipped_norms: list[float]


@dataclass(frozen=True)
class Combine:
    """A rule for rows x with weights w, and how they are mixed before it.

    - clipped: z = the geometric median, r = the median distance from z ; D = z + mean of (x - z) * min(1, r / |x - z|)
      over rows within 3 r, thrice, each time with z = D (after centered clipping, Karimireddy et al., 2012.10333)
    - median: the z of least mean distance, by smoothed Weiszfeld (Pillutla et al., 1912.13445)
    - trimmed: entry by entry the mean without the n // 3 largest and n // 3 smallest (Yin et al., 1803.01498)

    Members with unlike data look like liars: `pairs` combines means of two, drawn anew each round (Karimireddy et al.,
    2006.09365), `near` the mean of each row and its n - n // 3 - 1 nearest ones (Allouah et al., 2302.01772).
    """

    rule: str = "mean"
    mix: str = ""

    def __post_init__(self) -> None:
        if self.rule not in _RULES or self.mix not in _MIXES or (self.mix and self.rule == "mean"):
            raise SchemeError(f"combine={self} does not exist; use {', '.join(_RULES)}, clipped+pairs or clipped+near")

    @classmethod
    def parse(cls, text: str) -> Combine:
        """The rule of a text like "clipped" or "clipped+near"."""
        rule, _, mix = text.partition("+")
        return cls(rule, mix)

    def __str__(self) -> str:
        return f"{self.rule}+{self.mix}" if self.mix else self.rule

    def __call__(self, rows: Tensor, tokens: Sequence[int], key: str) -> Combined:
        """Combine finite float32 rows that weigh by these tokens; `key` names the draw of pairs."""
        weights = torch.tensor(tokens, dtype=torch.float64) / math.fsum(tokens)
        products = _inner_products(rows)
        lengths = products.diagonal().sqrt()
        scales = (_LONGEST * _upper_median(lengths) / lengths.clamp(min=_TINY)).clamp_(max=1)
        products *= scales[:, None] * scales
        mixing, mixed_weights = _mixing(self.mix, products, weights, key)
        if self.rule == "trimmed":
            drift, shares, norms = _trimmed(rows, mixing * scales, mixed_weights)
            shares = shares @ mixing / weights
            norms = mixed_weights * norms @ mixing / weights
            norms += (1 - mixed_weights @ mixing / weights).abs() * _distances(products, weights)
        else:
            mixed = mixing @ products @ mixing.T
            coefficients = _median(mixed, mixed_weights)
            if self.rule == "clipped":
                coefficients = _clipped(mixed, mixed_weights, coefficients)
            coefficients = coefficients @ mixing
            drift = (coefficients * scales).to(rows) @ rows
            shares = coefficients / weights
            norms = (1 - shares).abs() * _distances(products, coefficients)
        return Combined(drift, (shares * scales).tolist(), (norms + (1 - scales) * lengths).tolist())


def at_most_median(tokens: Sequence[int]) -> list[int]:
    """The tokens by which rows weigh under a rule: a member states its own, so none counts more than the median's."""
    median = sorted(tokens)[len(tokens) // 2]
    return [min(each, median) for each in tokens]


def _mixing(mix: str, products: Tensor, weights: Tensor, key: str) -> tuple[Tensor, Tensor]:
    """(the matrix by which rows are mixed, the weights of the mixed rows)."""
    n = len(weights)
    if mix == "pairs":
        order = random.Random(key).sample(range(n), n)
        groups = [order[first : first + 2] for first in range(0, n, 2)]
        mixed_weights = torch.stack([weights[group].sum() for group in groups])
    elif mix == "near":
        squares = products.diagonal()
        apart = squares[:, None] + squares - 2 * products
        groups = apart.argsort(dim=1, stable=True)[:, : n - n // 3].tolist()
        mixed_weights = weights
    else:
        return torch.eye(n, dtype=torch.float64), weights
    mixing = torch.zeros(len(groups), n, dtype=torch.float64)
    for row, group in zip(mixing, groups, strict=True):
        row[group] = weights[group] / weights[group].sum()
    return mixing, mixed_weights


def _chunks(entries: Tensor) -> list[Tensor]:
    return [entries[..., start : start + _CHUNK] for start in range(0, entries.shape[-1], _CHUNK)]


def _inner_products(rows: Tensor) -> Tensor:
    """Those of all pairs of rows, on the CPU: float32 within a chunk, float64 between them."""
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for chunk in _chunks(rows):
        products += chunk @ chunk.T
    return products.cpu()


def _upper_median(values: Tensor) -> Tensor:
    return values.sort().values[len(values) // 2]


def _distances(products: Tensor, coefficients: Tensor) -> Tensor:
    """|x - z| of every row x from z, the sum of rows by coefficients."""
    along = products @ coefficients
    return (products.diagonal() - 2 * along + coefficients @ along).clamp_(min=0).sqrt_()


def _median(products: Tensor, weights: Tensor) -> Tensor:
    """The coefficients of the geometric median: z = the mean of x by w / |x - z|, until it stands still."""
    coefficients = weights
    for _ in range(_MOST_ITERATIONS):
        distances = _distances(products, coefficients)
        pulls = weights / distances.clamp(min=max(_TINY, _SMOOTH * float(distances.max())))
        before, coefficients = coefficients, pulls / pulls.sum()
        if (coefficients - before).abs().max() < _STILL:
            break
    return coefficients


def _clipped(products: Tensor, weights: Tensor, coefficients: Tensor) -> Tensor:
    """The coefficients of a centre that moves by the mean of what near rows differ from it, clipped."""
    for _ in range(_NUM_CENTRES):
        distances = _distances(products, coefficients)
        radius = _upper_median(distances)
        near = weights * (distances <= _FAR * radius)
        pulls = near / near.sum() * (radius / distances.clamp(min=_TINY)).clamp(max=1)
        coefficients = pulls + (1 - pulls.sum()) * coefficients
    return coefficients


def _trimmed(rows: Tensor, mixing: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the trimmed mean of mixed rows, the weight that each has in it, the norm of what was trimmed of each)."""
    n = len(mixing)
    drift = torch.empty_like(rows[0])
    squares = torch.zeros(n, dtype=torch.float64, device=rows.device)
    kept_weights = torch.zeros_like(squares)  # summed over entries
    mixing, column = mixing.to(rows), weights.to(rows)[:, None]
    for chunk, part in zip(_chunks(rows), _chunks(drift), strict=True):
        mixed = mixing @ chunk
        ascending = list(mixed)
        for stage in range(n):  # odd-even transposition: a fifth of the time of torch.sort over so few
            for i in range(stage % 2, n - 1, 2):
                lower = torch.minimum(ascending[i], ascending[i + 1])
                ascending[i], ascending[i + 1] = lower, torch.maximum(ascending[i], ascending[i + 1])
        is_kept = (mixed >= ascending[n // 3]) & (mixed <= ascending[n - 1 - n // 3])
        shares = is_kept * column
        shares /= shares.sum(0)
        part.copy_((shares * mixed).sum(0))
        kept_weights += shares.sum(1)
        squares += ((mixed - part) * ~is_kept).square_().sum(1)
    return drift, kept_weights.cpu() / rows.shape[1], squares.sqrt().cpu()
