"""Top-k by a score that pulls the workers' choices together, so that their union is small."""

from dataclasses import dataclass, replace
from functools import lru_cache
from zlib import crc32

import torch
from torch import Tensor

from laconic.errors import SchemeError
from laconic.layout import Layout, positions_of
from laconic.select.bucket_plan import BucketPlan
from laconic.select.randk import RandK
from laconic.select.scores import SCORES, Score
from laconic.select.topk import TopK

_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Overlap(TopK):
    """The k largest score(r, past), where the past is what all workers heard from the server (Wang et al., ICNCC 2018).

    The scores are ours: see select/scores.py. A share `explore` of k goes round all entries in turn instead, the same
    on every worker, so that none waits for ever.
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
        """The entries whose turn it is, the same on every worker; ascending, int64, on the host."""
        if not self.explore:
            return positions_of((), _HOST)
        rounds = _rounds(self, layout, density, bucket)
        turns = [turn.positions(plan, step, key, _HOST) + start for turn, plan, key, start in rounds]
        return torch.cat([positions_of((), _HOST), *turns])


@lru_cache
def _rounds(
    select: Overlap, layout: Layout, density: float, bucket: int
) -> tuple[tuple[RandK, BucketPlan, int, int], ...]:
    """(the turns that entries take, among which, what they are drawn by, where those begin) for each independent round.

    Parameters that are chosen by themselves also take turns by themselves, whichever bucket they are in.
    """
    turn = RandK(rho=density * select.explore, mode="cycle", dense_below=select.dense_below)
    if not select.per_parameter:
        return ((turn, turn.plan(layout, turn.rho), bucket, 0),)
    alone = [(span, Layout.of([span.name], [span.num_entries])) for span in layout.spans if span.num_entries]
    return tuple((turn, turn.plan(of, turn.rho), crc32(span.name.encode()), span.start) for span, of in alone)
