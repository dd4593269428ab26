"""One drift of those of all members, of whom some may lie: the mean, or a rule that a third of them cannot lead astray.

Every rule but `trimmed` is a weighted sum of rows, whose weights follow from the rows' inner products alone. What is so
small as those is numpy's, which takes a fifth of the time per operation that torch does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.errors import SchemeError

_Array = NDArray[np.float64]

_RULES = ("mean", "clipped", "median", "trimmed")
_MIXES = ("", "pairs", "near")
_CHUNK = 1 << 13  # columns at a time: those of eight rows stay in a core's cache
_LONGEST = 10.0  # median lengths; longer rows are shortened to that first, or they would drown the others in rounding
_FAR = 3.0  # radii; who is farther from the centre is left out
_ALIKE = 0.5  # of the usual distance between two rows, and of their lengths; those nearer share one weight
_SHORT, _MADS = 0.5, 3.0  # who goes along the centre less than median - max(0.5 median, 3 MAD) is left out
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

    - clipped: rows that are nearly the same share one weight (after FoolsGold, Fung et al., 1808.04866) ; z = the
      geometric median, r = the median distance from z ; D = z + mean of (x - z) * min(1, r / |x - z|) over rows within
      3 r that go along z, thrice, each time with z = D (after centered clipping, Karimireddy et al., 2012.10333)
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

    def __call__(self, rows: Tensor, tokens: Sequence[int], key: str, products: _Array | None = None) -> Combined:
        """Combine finite float32 rows that weigh by these tokens.

        Args:
            rows: A row for each member.
            tokens: What each weighs.
            key: It names the draw of pairs.
            products: `inner_products(rows)`, where they are known.

        Returns:
            What the rule makes of the rows, and what it kept out of each.
        """
        weights = np.array(tokens, dtype=np.float64) / math.fsum(tokens)
        products = inner_products(rows) if products is None else products
        lengths = np.sqrt(products.diagonal())
        scales = np.minimum(_LONGEST * _upper_median(lengths) / np.maximum(lengths, _TINY), 1)
        products = products * scales[:, None] * scales
        counted = _shared(products, weights) if self.rule == "clipped" else weights
        mixing, mixed_weights = _mixing(self.mix, products, counted, key)
        if self.rule == "trimmed":
            drift, shares, norms = _trimmed(rows, mixing * scales, mixed_weights)
            shares = shares @ mixing / weights
            norms = mixed_weights * norms @ mixing / weights
            norms += np.abs(1 - mixed_weights @ mixing / weights) * _distances(products, weights)
        else:
            mixed = mixing @ products @ mixing.T
            centre = _median(mixed, mixed_weights)
            coefficients = (_clipped(mixed, mixed_weights, centre) if self.rule == "clipped" else centre) @ mixing
            drift = torch.from_numpy(coefficients * scales).to(rows) @ rows
            shares = coefficients / weights
            norms = np.abs(1 - shares) * _distances(products, coefficients)
        return Combined(drift, (shares * scales).tolist(), (norms + (1 - scales) * lengths).tolist())


def at_most_median(tokens: Sequence[int]) -> list[int]:
    """The tokens by which rows weigh under a rule: a member states its own, so none counts more than the median's."""
    median = sorted(tokens)[len(tokens) // 2]
    return [min(each, median) for each in tokens]


def inner_products(rows: Tensor) -> _Array:
    """The inner products of all pairs of rows: float32 within a chunk, float64 between them.

    A row that is not finite, or whose square is no float32, is so on the diagonal.
    """
    num_chunks = rows.shape[1] // _CHUNK
    whole, rest = rows.tensor_split([num_chunks * _CHUNK], dim=1)
    chunks = whole.view(len(rows), num_chunks, _CHUNK).transpose(0, 1)
    products: _Array = (torch.bmm(chunks, chunks.mT).sum(0, dtype=torch.float64) + rest @ rest.T).numpy(force=True)
    return products


def _shared(products: _Array, weights: _Array) -> _Array:
    """The weights of rows of which a few that are nearly the same share one: a minority with one lie counts once.

    The usual distance is that of as many nearest pairs as a majority makes, which no minority can make.
    """
    n = len(weights)
    if n == 1:
        return weights
    majority = n // 2 + 1
    apart = _squares_apart(products)
    pairs = np.sort(apart[np.triu_indices(n, 1)])
    squares = np.minimum(products.diagonal(), pairs[majority * (majority - 1) // 2 - 1])  # short rows are no copies
    num_alike = (apart <= _ALIKE**2 * np.minimum(squares[:, None], squares)).sum(1)
    counted: _Array = weights / np.where(num_alike < majority, np.maximum(num_alike, 1), 1)
    counted /= counted.sum()
    return counted


def _mixing(mix: str, products: _Array, weights: _Array, key: str) -> tuple[_Array, _Array]:
    """(the matrix by which rows are mixed, the weights of the mixed rows)."""
    n = len(weights)
    if mix == "pairs":
        order = random.Random(key).sample(range(n), n)
        groups = [order[first : first + 2] for first in range(0, n, 2)]
        mixed_weights = np.array([weights[group].sum() for group in groups])
    elif mix == "near":
        groups = _squares_apart(products).argsort(axis=1, kind="stable")[:, : n - n // 3].tolist()
        mixed_weights = weights
    else:
        return np.eye(n), weights
    mixing = np.zeros((len(groups), n))
    for row, group in zip(mixing, groups, strict=True):
        row[group] = weights[group] / weights[group].sum()
    return mixing, mixed_weights


def _chunks(entries: Tensor) -> list[Tensor]:
    return [entries[..., start : start + _CHUNK] for start in range(0, entries.shape[-1], _CHUNK)]


def _upper_median(values: _Array) -> float:
    return float(np.sort(values)[len(values) // 2])


def _squares_apart(products: _Array) -> _Array:
    squares = products.diagonal()
    apart: _Array = squares[:, None] + squares - 2 * products
    return apart


def _distances(products: _Array, coefficients: _Array) -> _Array:
    """|x - z| of every row x from z, the sum of rows by coefficients."""
    along = products @ coefficients
    distances: _Array = np.sqrt(np.maximum(products.diagonal() - 2 * along + coefficients @ along, 0))
    return distances


def _median(products: _Array, weights: _Array) -> _Array:
    """The coefficients of the geometric median: z = the mean of x by w / |x - z|, until it stands still."""
    coefficients = weights
    for _ in range(_MOST_ITERATIONS):
        distances = _distances(products, coefficients)
        pulls = weights / np.maximum(distances, max(_TINY, _SMOOTH * distances.max()))
        before, coefficients = coefficients, pulls / pulls.sum()
        if np.abs(coefficients - before).max() < _STILL:
            break
    return coefficients


def _clipped(products: _Array, weights: _Array, coefficients: _Array) -> _Array:
    """The coefficients of a centre that moves by what the rows near to it that go along differ from it, clipped.

    Half of the rows are near and half go along, so some do both. Who weighs less may go less far.
    """
    for _ in range(_NUM_CENTRES):
        distances = _distances(products, coefficients)
        radius = _upper_median(distances)
        along = products @ coefficients
        usual = _upper_median(along)
        least = usual - max(_SHORT * abs(usual), _MADS * _upper_median(np.abs(along - usual)))
        goes_along = along >= (least * weights / weights.max() if least > 0 else least)
        near = weights * goes_along * (distances <= _FAR * radius)
        pulls = near / near.sum() * np.minimum(radius / np.maximum(distances, _TINY), 1)
        coefficients = pulls + (1 - pulls.sum()) * coefficients
    return coefficients


def _trimmed(rows: Tensor, mixing: _Array, weights: _Array) -> tuple[Tensor, _Array, _Array]:
    """(the trimmed mean of mixed rows, the weight that each has in it, the norm of what was trimmed of each)."""
    n = len(mixing)
    drift = torch.empty_like(rows[0])
    squares = torch.zeros(n, dtype=torch.float64, device=rows.device)
    kept_weights = torch.zeros_like(squares)  # summed over entries
    mixer, column = torch.from_numpy(mixing).to(rows), torch.from_numpy(weights).to(rows)[:, None]
    for chunk, part in zip(_chunks(rows), _chunks(drift), strict=True):
        mixed = mixer @ chunk
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
    return drift, (kept_weights / rows.shape[1]).numpy(force=True), squares.sqrt().numpy(force=True)
