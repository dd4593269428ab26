"""Top-k by a score that pulls the workers' selections together, so that their union is small.

A score is a small function of the residual and of what all workers have received from the server. An entry that the
past says nothing of has the score |r|, so only those it does speak of need another look.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from zlib import crc32

import torch
from torch import Tensor

from laconic.errors import SchemeError
from laconic.layout import Layout, positions_of
from laconic.select.bucket_plan import BucketPlan
from laconic.select.shared import RandK
from laconic.select.topk import TopK

_HOST = torch.device("cpu")
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


@dataclass(frozen=True, kw_only=True)
class Overlap(TopK):
    """The k largest score(r, past), the past being what all received from the server (Wang et al., ICNCC 2018).

    The scores are ours. A share `explore` of k goes round all entries in turn instead, the same on every worker, so
    that none waits for ever.
    """

    needs_owners = True

    score: str = "product"
    strength: float = 0.0  # the score's own parameter (a, or e of product); 0: its default
    explore: float = 0.02  # of k; every entry goes at least once in 1/(rho*explore) steps

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score not in SCORES:
            raise SchemeError(f"Overlap.score is {self.score!r}; give one of {', '.join(SCORES)}")
        if self.strength < 0:
            raise SchemeError(f"Overlap.strength is {self.strength}; give a number above 0, or 0 for the default")
        if not 0 <= self.explore < 1:
            raise SchemeError(f"Overlap.explore is {self.explore}; give a share in [0, 1)")

    @property
    def scored(self) -> Score:
        """The score with the strength that was asked for."""
        score = SCORES[self.score]
        return replace(score, strength=self.strength) if self.strength else score

    def plan(self, layout: Layout, density: float) -> BucketPlan:
        return super().plan(layout, density * (1 - self.explore))

    @property
    def asks_host(self) -> bool:
        """Also where a score is of its norm, where the past fades, and where a past is cut into windows."""
        score = self.scored
        return super().asks_host or score.needs_norm or score.fades or self.per_parameter

    def swept(self, layout: Layout, density: float, step: int, bucket: int) -> Tensor:
        """The entries that are swept in a step, the same on every worker; ascending, int64, on the host."""
        if not self.explore:
            return positions_of((), _HOST)
        rounds = _rounds(self, layout, density, bucket)
        swept = [sweep.positions(plan, step, key, _HOST) + start for sweep, plan, key, start in rounds]
        return torch.cat([positions_of((), _HOST), *swept])


@lru_cache
def _rounds(
    select: Overlap, layout: Layout, density: float, bucket: int
) -> tuple[tuple[RandK, BucketPlan, int, int], ...]:
    """(the sweep, among which entries, what it is drawn by, where those begin) for each independent round.

    Parameters that are selected by themselves are also swept by themselves, whichever bucket they are in.
    """
    sweep = RandK(rho=density * select.explore, mode="cycle", dense_below=select.dense_below)
    if not select.per_parameter:
        return ((sweep, sweep.plan(layout, sweep.rho), bucket, 0),)
    alone = [(span, Layout.of([span.name], [span.num_entries])) for span in layout.spans if span.num_entries]
    return tuple((sweep, sweep.plan(of, sweep.rho), crc32(span.name.encode()), span.start) for span, of in alone)
