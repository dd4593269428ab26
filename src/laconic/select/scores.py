"""Scores that make workers agree: each a small function of the residual and of what all have heard from the server.

An entry that the past says nothing of has the score |r|, so only those it does speak of need another look.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

_FADE = 0.9  # of a count of hits, at each step
_FORGOTTEN = 0.01  # a count under this is none: 44 steps after a single hit


def local(size: Tensor, past: Tensor, strength: float, scale: float | Tensor) -> Tensor:
    """|r|: every worker for itself."""
    return size


def member(size: Tensor, past: Tensor, strength: float, scale: float | Tensor) -> Tensor:
    """|r| * (1 + a*[i in U]), U being the last union."""
    return size * (1 + strength)


def hits(size: Tensor, past: Tensor, strength: float, scale: float | Tensor) -> Tensor:
    """|r| * (1 + a*c), c a count of unions that fades by 0.9 a step."""
    return size * (1 + strength * past)


def product(size: Tensor, past: Tensor, strength: float, scale: float | Tensor) -> Tensor:
    """|r| * (e + |G|/mean|G|), G being the last aggregate, the mean over its entries; here divided by e."""
    return size * (1 + past / (strength * scale))


def total(size: Tensor, past: Tensor, strength: float, scale: float | Tensor) -> Tensor:
    """|r|/||r|| + a*|G|/||G||; here times ||r||."""
    return size + past * (strength * scale / float(past.norm()))


def last_members_(past: Tensor, before: Tensor, union: Tensor, aggregate: Tensor) -> None:
    """One where the last union was."""
    past.index_fill_(0, before, 0).index_fill_(0, union, 1)


def counted_(past: Tensor, before: Tensor, union: Tensor, aggregate: Tensor) -> None:
    """A fading count of the unions an entry was in."""
    faded = past[before] * _FADE
    past[before] = faded * (faded >= _FORGOTTEN)
    past[union] += 1


def last_sizes_(past: Tensor, before: Tensor, union: Tensor, aggregate: Tensor) -> None:
    """|G| of the last step."""
    past.index_fill_(0, before, 0).index_copy_(0, union, aggregate.abs())


@dataclass(frozen=True)
class Score:
    """How the past weighs in, and how it is kept: `note_(past, where it was not zero, U, G[U])`."""

    of: Callable[[Tensor, Tensor, float, float | Tensor], Tensor]
    note_: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None
    strength: float  # a, or e
    needs_norm: bool = False  # as its scale: ||r||
    needs_mean: bool = False  # mean|G|
    fades: bool = False  # rather than being replaced by each answer


SCORES = {
    "local": Score(local, None, 0.0),
    "member": Score(member, last_members_, 1.0),
    "hits": Score(hits, counted_, 1.0, fades=True),
    # By the mean, since max|G| is an outlier, 50 times the mean in the fashion-mnist CNN and 5 times in ResNet-8: no
    # one e of it does for both.
    "product": Score(product, last_sizes_, 0.35, needs_mean=True),
    "sum": Score(total, last_sizes_, 1.0, needs_norm=True),
}
