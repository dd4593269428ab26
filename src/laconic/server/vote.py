"""A vote: the sign of the sum of the workers' signs, or of their signs weighted by how often each was right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from laconic import kernels
from laconic.kernels import nonzero
from laconic.wire import Contents

_DECAY = 0.99  # of a record at each step: a hundred steps back counts a third
_PRIOR = 100.0  # votes on either side that a record begins with, so that it is slow to judge
_MOST_LOG_ODDS = 4.0  # one worker that was never wrong outweighs no more than a handful


@dataclass
class Vote:
    """vote = sign(sum over workers of w*sign), in {-1, 0, 1}; w = 1, or the clipped log-odds of past agreement.

    Weights of a record are Park and Lee's (arXiv 2402.01340, ICML 2024, and 2403.16372); how it is kept is ours.
    A worker agrees where its sign is that of the others' plain sum, its own left out: who votes alone is not right for
    that. Records fade, and a worker that is wrong more often than right counts the other way round. (Judged by the
    weighted sum, records bear out a world in which right and wrong have changed places: training then diverges and
    stays there.) One or two workers have no majority to tell who is wrong, and count the same.
    """

    weighted: bool
    _records: dict[int, tuple[float, float]] = field(default_factory=dict)  # by rank: agreements, disagreements
    _step: int = -1  # for which they have faded

    def weight(self, rank: int) -> float:
        """What the sign of a worker counts."""
        if rank not in self._records:
            return 1.0
        agreed, differed = (count + _PRIOR for count in self._records[rank])
        odds = torch.tensor(agreed / differed, dtype=torch.float64).log()
        return float(odds.clamp(-_MOST_LOG_ODDS, _MOST_LOG_ODDS))

    def take(
        self, received: Mapping[int, Contents], scratch: Tensor, fixed: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """(places, signs) of the entries that have a majority; `scratch` is all zeros, before and after."""
        if not self.weighted and fixed.numel() == scratch.numel() > 0:
            return _count([contents.values for contents in received.values()])
        signs = {rank: contents.values.sign() for rank, contents in received.items()}
        votes = signs
        if self.weighted and len(received) > 2:
            votes = {rank: self.weight(rank) * sign for rank, sign in signs.items()}
            self._fade(step)
            self._judge(received, signs, scratch, fixed)
        places, sums = _take_sums(scratch, received, votes, fixed)
        decided = nonzero(sums)
        return places.index_select(0, decided), sums.index_select(0, decided).sign()

    def _fade(self, step: int) -> None:
        """Let the past count less, once a step however many buckets are voted on."""
        if step != self._step:
            self._step = step
            self._records = {rank: (_DECAY * agreed, _DECAY * not_) for rank, (agreed, not_) in self._records.items()}

    def _judge(
        self, received: Mapping[int, Contents], signs: Mapping[int, Tensor], scratch: Tensor, fixed: Tensor
    ) -> None:
        """Enter into each worker's record how often it was of the others' opinion; `scratch` is all zeros, as above."""
        places, sums = _take_sums(scratch, received, signs, fixed)
        for rank, contents in received.items():
            at = torch.searchsorted(places, torch.cat([fixed.to(torch.int32), contents.positions]))
            others = (sums[at] - signs[rank]).sign()
            agreed, differed = self._records.get(rank, (0.0, 0.0))
            right = int((others == signs[rank]).sum())
            wrong = int((others == -signs[rank]).sum())
            self._records[rank] = agreed + right, differed + wrong

    def state_dict(self) -> dict[str, list[float]]:
        return {str(rank): list(record) for rank, record in self._records.items()}

    def load_state_dict(self, saved: Mapping[str, list[float]]) -> None:
        self._records = {int(rank): (record[0], record[1]) for rank, record in saved.items()}


def take_sides(values: Tensor, num_fixed: int, step: int) -> Tensor:
    """`values`, the first of which are no longer zero.

    A sign has one bit, so a zero would always vote for plus. It takes sides in turn instead, by entry and step and on
    all workers alike: what none of them has an opinion of moves to and fro, and nobody seems to contradict the others.
    """
    if not num_fixed:
        return values
    decided = values[:num_fixed] + _in_turn(num_fixed + 1, values.device)[step % 2 :][:num_fixed]
    return decided if num_fixed == values.numel() else torch.cat([decided, values[num_fixed:]])


@lru_cache
def _in_turn(count: int, device: torch.device) -> Tensor:
    """What decides a zero and nothing else: the smallest normal float32, plus and minus."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.tensor([tiny, -tiny], device=device).repeat(-(-count // 2))


def _take_sums(
    scratch: Tensor, received: Mapping[int, Contents], votes: Mapping[int, Tensor], fixed: Tensor
) -> tuple[Tensor, Tensor]:
    """(places, sums over workers of their votes, w*sign) of all entries that anybody speaks of, ascending."""
    everywhere = fixed.to(torch.int32)
    frames = [(everywhere, votes[rank][: fixed.numel()]) for rank in received]
    frames += [(contents.positions, votes[rank][fixed.numel() :]) for rank, contents in received.items()]
    positions, values = zip(*frames, strict=True)
    return kernels.sum_over_union_(scratch, positions, values, take=True)


def _count(everyone: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(places, signs) of the majorities where all speak of every entry: counted in bits, 32 entries at a time."""
    negative, tie = kernels.vote([kernels.pack_signs(values) for values in everyone])
    n = everyone[0].numel()
    votes = kernels.unpack_signs(negative, n, 1.0)
    decided = kernels.unpack_bits(~tie)
    places = decided[: torch.searchsorted(decided, n)]  # the last word may go on behind the last entry
    return places, votes if places.numel() == n else votes[places]
