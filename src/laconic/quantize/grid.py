"""Integer codes that a network adds: multiples of a step that all workers share, side by side in words.

The sum of the codes is the code of the sum.
"""

import itertools
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic.errors import SchemeError, check_least

_WORDS = (torch.int32, torch.int64)  # what Gloo and NCCL both add; neither knows int16, and Gloo adds fp16 4x slower
_WIDEST_LANE_BITS = 16  # from there on bf16 is as small
_WORDS_AT_ONCE = 4  # each lane then begins at a multiple of 16 bytes, which a GPU's thread moves at once
# Under this a largest magnitude counts as zero: levels/norm would come near the end of float32's range.
_SMALLEST_NORM = 2.0**-100
_MOST_SCALES = 4  # two bits in the map
_MOST_LEVELS = 1 << 20  # of the finest scale: times M it must stay whole in a float32

CODE_BITS = 4  # of a code, its sign included, unless given
_MOST_BITS = 32


def levels_of(bits: int, levels: int) -> int:
    """s = 2^(b-1) - 1, the codes of b bits with their sign; the paper's b leaves the sign out: s = 2^b - 1."""
    if levels and bits != CODE_BITS:
        raise SchemeError(f"bits={bits} and levels={levels} are both given; give one")
    if not 2 <= bits <= _MOST_BITS:
        raise SchemeError(f"bits is {bits}; give 2 to {_MOST_BITS}, of which one is the sign")
    return levels or (1 << (bits - 1)) - 1


def levels_listed(bits: str | int, levels: str | int) -> tuple[int, ...]:
    """The level counts of one scale or several, coarse first, of lists like 6+10 bits or 31+511 levels."""
    try:
        bits_of, counts = ([int(number) for number in str(listed).split("+")] for listed in (bits, levels))
    except ValueError:
        raise SchemeError(f"bits is {bits!r} and levels {levels!r}; give whole numbers, several like 6+10") from None
    if counts == [0]:
        return tuple(levels_of(width, 0) for width in bits_of)
    if bits_of != [CODE_BITS]:
        raise SchemeError(f"bits={bits} and levels={levels} are both given; give one")
    return tuple(counts)


def round_up(norms: Tensor) -> Tensor:
    """float32 >= 0 as the next bf16, at most 1/128 more: half the bits, and nothing lies beyond the last level."""
    return ((norms.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


@dataclass(frozen=True)
class Steps:
    """The grid of one bucket at one step, the same on every worker; a group is a run of entries with one scale."""

    group: int
    inverse: Tensor  # float32 per group: levels over the norm; times |g| it is the place on the grid
    step: Tensor  # float32 per group: what a code of one worker is worth
    mean_step: Tensor  # float32 per group: what the sum of M workers' codes is worth in the mean


@dataclass(frozen=True)
class Grid:
    """Codes q = sign(g)*(floor(|g|/n*s) + Bernoulli(frac)), |q| <= s; the mean over M workers reads n/s * sum(q)/M.

    n is the largest |g| on any worker, in a bucket or a block of it, rounded up to a bf16. Rounding is unbiased, drawn
    from (seed, rank, step, bucket, position), so the step in a checkpoint is all the state there is.
    """

    adds = True
    rounds_to_nearest = False

    levels: int  # s: codes lie in [-s, s]
    _: KW_ONLY
    block: int = 0  # entries that share a norm, of 16 bits; 0: the whole bucket
    seed: int = 0  # of the draws that round

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= largest_levels(1):
            name = type(self).__name__
            raise SchemeError(f"{name}.levels is {self.levels}; give 1 to {largest_levels(1)}")
        check_least(self, block=0, seed=0)

    @property
    def level_counts(self) -> tuple[int, ...]:
        """s of each scale, from coarse to fine."""
        return (self.levels,)

    def norm_group(self, count: int) -> int:
        """The number of `count` entries that share a norm."""
        return self.block or max(1, count)

    def scale_group(self, count: int) -> int:
        """The number of `count` entries that share a scale; one scale alone needs no map of scales."""
        return self.norm_group(count)

    @property
    def map_bits(self) -> int:
        """Bits of a number of a scale in the map that the workers agree on: 2 for up to 4."""
        return (len(self.level_counts) - 1).bit_length()

    def num_norms(self, count: int) -> int:
        """Norms that the workers agree on for `count` entries."""
        return -(-count // self.norm_group(count))

    def num_map_words(self, count: int) -> int:
        """32-bit words of the map of scales; none where there is one scale."""
        num_groups = -(-count // self.scale_group(count))
        return -(-num_groups * self.map_bits // 32)

    def finest_fitting(self, largest: Tensor, norms: Tensor, count: int) -> Tensor:
        """For each group the finest scale on which its largest magnitude is at most s, as int32."""
        place = largest.unsqueeze(1) * self._inverses(self._norm_of_groups(norms, count))
        # Finer scales have larger places, so those that fit come first.
        return (place[:, 1:] <= self.levels).sum(1, dtype=torch.int32)

    def steps(self, norms: Tensor, scales: Tensor | None, count: int, num_workers: int) -> Steps:
        """The grid for agreed norms and scales (None where there is one scale)."""
        norms = self._norm_of_groups(norms, count)
        counts = self._counts(norms)
        # Tensors divide tensors: on CUDA a division by a Python number multiplies by its reciprocal, an ulp away.
        tables = self._inverses(norms), norms.unsqueeze(1) / counts, norms.unsqueeze(1) / (counts * num_workers)
        column = torch.zeros_like(norms, dtype=torch.int64) if scales is None else scales.to(torch.int64)
        return Steps(self.scale_group(count), *(table.gather(1, column.unsqueeze(1)).squeeze(1) for table in tables))

    def _norm_of_groups(self, norms: Tensor, count: int) -> Tensor:
        """The norm of each group that shares a scale; a block of norms is a whole number of such groups."""
        groups_per_norm = -(-self.norm_group(count) // self.scale_group(count))
        return norms.repeat_interleave(groups_per_norm)[: -(-count // self.scale_group(count))]

    def _inverses(self, norms: Tensor) -> Tensor:
        table = self._counts(norms) / norms.unsqueeze(1)
        return torch.where(norms.unsqueeze(1) < _SMALLEST_NORM, torch.zeros_like(table), table)

    def _counts(self, like: Tensor) -> Tensor:
        return torch.tensor(self.level_counts, dtype=torch.float32, device=like.device).unsqueeze(0)


@dataclass(frozen=True)
class MaxNorm(Grid):
    """Codes lie on the grid n/s * {-s, ..., s} (Vineeth S, arXiv 2109.12497); blocks with their own norm are ours.

    The variance of the mean is at most n^2*N/(4*s^2*M), so a block whose entries are all small gains by its own n.

    Example:
        >>> scheme = laconic.Scheme(quantize=MaxNorm(7, block=512))
    """


@dataclass(frozen=True, kw_only=True)
class MultiScale(Grid):
    """A grid has s_j = s*ratio^j levels; an entry takes the finest on which every worker's |g|/n*s_j is at most s.

    So codes stay in [-s, s] while the step shrinks with the entry (Vineeth S, arXiv 2109.12497). The scales are agreed
    on by a lane-wise MIN over maps of 1 or 2 bits per `share` entries; sharing, and powers of a ratio where no list of
    level counts is given, are ours.

    Example:
        >>> scheme = laconic.Scheme(quantize=MultiScale(7, scales=2))
    """

    scales: int = 4
    ratio: int = 2  # of each scale's level count to the one before
    share: int = 16  # entries that share a scale; 1 is the paper's
    finer: str = ""  # level counts of the scales after the first, like 127+511, instead of `scales` and `ratio`

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.level_counts
        if not 2 <= len(counts) <= _MOST_SCALES:
            raise SchemeError(f"MultiScale has {len(counts)} scales; give 2 to {_MOST_SCALES}, or use MaxNorm()")
        if any(fine <= coarse for coarse, fine in itertools.pairwise(counts)):
            raise SchemeError(f"the scales have {counts} levels; give each more than the one before")
        check_least(self, ratio=2, share=1)
        if self.block % self.share:
            raise SchemeError(
                f"MultiScale.block is {self.block} and share {self.share}; give a block that is a multiple of it"
            )
        if self.level_counts[-1] > _MOST_LEVELS:
            raise SchemeError(
                f"the finest of these scales has {self.level_counts[-1]} levels; give fewer levels, scales or ratio, "
                f"so that it has {_MOST_LEVELS} at most"
            )

    @cached_property
    def level_counts(self) -> tuple[int, ...]:
        if self.finer:
            return (self.levels, *levels_listed(CODE_BITS, self.finer))
        return tuple(self.levels * self.ratio**j for j in range(self.scales))

    def scale_group(self, count: int) -> int:
        return self.share


@dataclass(frozen=True)
class Carrier:
    """Lanes of `lane_bits`, as many as fit, in words of one type.

    int8 would be lanes of 8 bits in no fewer bytes, and fp16, whole up to 2048, is never smaller than lanes.
    """

    lane_bits: int
    dtype: torch.dtype
    num_rows: int = 1  # with two stages the words are M equal rows, one for each worker to add

    @property
    def lanes(self) -> int:
        """Integers in a word."""
        return self.dtype.itemsize * 8 // self.lane_bits

    @property
    def bits_per_entry(self) -> float:
        """The bits of one integer, unused ones of its word included."""
        return self.dtype.itemsize * 8 / self.lanes

    def num_words(self, count: int) -> int:
        """Words for `count` integers; the last row and the last lane may be partly empty."""
        multiple = _WORDS_AT_ONCE * self.num_rows
        return -(-count // (self.lanes * multiple)) * multiple

    def num_bytes(self, count: int) -> int:
        return self.num_words(count) * self.dtype.itemsize


def carrier_for(levels: int, num_workers: int, stages: int = 0) -> Carrier:
    """The carrier of codes in [-levels, levels] that M workers add.

    In one stage the network adds, and a lane holds the sum: ceil(log2(2*s*M + 1)) bits. In two stages it holds one
    code, ceil(log2(2*s + 1)) bits whatever M is, but the mean is rounded to a code again. With stages=0 the size
    decides: two stages where they send less than half, which is from 19 workers on at 4 bits and from 67 at 6. Codes of
    one level are not rounded twice unasked: so rounded among 4 workers, a small net diverged at a rate at which it
    trains well in one stage. The second rounding adds up to (n/s)^2/4 to an entry's variance, whatever M is: two stages
    are outside the paper's bound, (n/s)^2/(4*M).
    """
    one = _narrowest(levels * num_workers)
    two = _narrowest(levels, num_workers)
    if stages == 0:
        stages = 2 if levels > 1 and one.bits_per_entry > 2 * two.bits_per_entry else 1
    if stages == 2:
        return two
    if one.lane_bits > _WIDEST_LANE_BITS:
        raise SchemeError(
            f"{levels} levels added over {num_workers} workers need {one.lane_bits} bits, more than bf16; "
            f"use {largest_levels(num_workers)} levels or fewer, or stages=2"
        )
    return one


def largest_levels(num_workers: int) -> int:
    """The most levels whose sum over M workers fits a lane that is worth sending: 2*s*M + 1 <= 2^16."""
    return ((1 << _WIDEST_LANE_BITS) - 1) // (2 * num_workers)


def _narrowest(largest: int, num_rows: int = 1) -> Carrier:
    """Lanes for integers in [-largest, largest], in the word that wastes less; of equals the shorter."""
    lane_bits = (2 * largest).bit_length()  # ceil(log2(2*largest + 1))
    fitting = [Carrier(lane_bits, dtype, num_rows) for dtype in _WORDS if lane_bits <= dtype.itemsize * 8]
    return min(fitting, key=lambda carrier: carrier.bits_per_entry)
