"""Two bits a value: its sign, and one of two sizes that its neighbours share."""

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import SchemeError
from laconic.quantize.quantizers import SMALLEST, Quantizer

_VALUES_PER_WORD = 16
_MOST_IN_GROUP = 4096
_ROUNDS = 3  # seven would lose 0.74 % of the drift below instead of 0.76 %, were sizes not rounded
_UNITS = 2.0**40  # of the frame's largest |v|: sums of so many whole numbers are exact in float64, in any order

# The sizes of a group take 12 bits: the larger as a share of the frame's largest |v|, the smaller in sixteenths of it.
_SIZE_BITS = 8
_SHARE_BITS = 4
_SHARES = 1 << _SHARE_BITS
_LANE_BITS = _SIZE_BITS + _SHARE_BITS
# A size is a float32 in (2^-32, 1] with 3 bits behind the point; its code is how many such floats lie between it and 1.
_DROPPED_BITS = 20
_ONE = 127 << (23 - _DROPPED_BITS)  # the bits of 1.0 that are left
_NO_SIZE = (1 << _SIZE_BITS) - 1  # stands for 0


@dataclass(frozen=True, kw_only=True)
class Lloyd(Quantizer):
    """The nearest of {-b, -a, a, b}, a and b being the means of the smaller and larger |v| of every `group` values.

    They are parted where each is nearer to the mean of its own (Lloyd, IEEE Trans. Inf. Theory 1982), from the mean of
    all on, in three rounds. What top-k sends has no small values, so this loses little, where `levels(bits=2)` loses
    most of it (two-bit-codes in docs/results.md). SparseLoCo (arXiv 2508.15706) also sends two bits a value; the code
    is ours.
    """

    code_id = 9
    code_dtype = torch.int32
    rounds_to_nearest = True

    group: int = 128  # values that share two sizes, which take 12 bits

    def __post_init__(self) -> None:
        if not 0 < self.group <= _MOST_IN_GROUP or self.group % _VALUES_PER_WORD:
            raise SchemeError(f"Lloyd.group is {self.group}; give a multiple of 16, up to {_MOST_IN_GROUP}")

    def num_bytes(self, count: int) -> int:
        words = -(-count // _VALUES_PER_WORD)
        return 4 * (self._num_size_words(words) + words)

    def _num_size_words(self, num_words: int) -> int:
        """The words for the sizes, before so many for the values."""
        return -(-self._num_groups(num_words) * _LANE_BITS // 32)

    def _num_groups(self, num_words: int) -> int:
        return -(-num_words * _VALUES_PER_WORD // self.group)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        count = values.numel()
        if count == 0:
            return values.new_empty(0, dtype=torch.int32), values.new_ones(())
        sizes = values.abs()
        top = sizes.max().clamp_min(SMALLEST)
        num_groups = -(-count // self.group)
        units = values.new_zeros(num_groups * self.group, dtype=torch.float64)
        units[:count] = sizes.to(torch.float64).div_(top).mul_(_UNITS).round_()
        units = units.view(num_groups, self.group)
        lanes = _lanes_of(*_two_means(units, count))
        low, high = (size.to(torch.float64) * _UNITS for size in _sizes_of(lanes))
        is_large = units > ((low + high) / 2).unsqueeze(1)
        codes = (values < 0).to(torch.int32).add_(is_large.view(-1)[:count], alpha=2)
        return torch.cat([kernels.pack_lanes(lanes, _LANE_BITS), kernels.pack_lanes(codes, 2)]), top

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        # Only one number of words for values makes this many in all.
        num_words = bisect_left(range(codes.numel()), codes.numel(), key=lambda n: n + self._num_size_words(n))
        num_size_words = codes.numel() - num_words
        low, high = _sizes_of(kernels.unpack_lanes(codes[:num_size_words], self._num_groups(num_words), _LANE_BITS))
        four = torch.stack([low, -low, high, -high], dim=1).mul_(scale)
        which = kernels.unpack_lanes(codes[num_size_words:], num_words * _VALUES_PER_WORD, 2)
        first = torch.arange(0, four.numel(), 4, dtype=torch.int32, device=codes.device).repeat_interleave(self.group)
        return four.view(-1).index_select(0, first[: which.numel()].add_(which))


def _two_means(units: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The means of the smaller and of the larger of each row, of `count` in all; behind those are zeros."""
    per_row = torch.full(units.shape[:1], units.shape[1], dtype=torch.float64, device=units.device)
    per_row[-1] -= units.numel() - count
    total = units.sum(1)
    low = high = total / per_row
    above = torch.empty_like(units)
    for _ in range(_ROUNDS):
        cut = ((low + high) / 2).floor_()  # a whole number is above that where it is above the middle
        torch.sub(units, cut.unsqueeze(1), out=above)
        num_larger = (above > 0).sum(1, dtype=torch.int32)
        larger = above.relu_().sum(1) + cut * num_larger  # a third of the time of a sum under a mask
        low = (total - larger) / (per_row - num_larger)  # the smallest is never among the larger
        high = torch.maximum(low, larger / num_larger.clamp_min(1))  # where all are equal there are none
    return low, high


def _lanes_of(low: Tensor, high: Tensor) -> Tensor:
    """The codes of both sizes of each group, int32."""
    bits = (high / _UNITS).to(torch.float32).view(torch.int32)
    size = _ONE - ((bits + (1 << (_DROPPED_BITS - 1))) >> _DROPPED_BITS)
    share = (low / high.clamp_min(1.0) * _SHARES).round_().to(torch.int32).clamp_(max=_SHARES - 1)
    return (size.clamp_(0, _NO_SIZE) << _SHARE_BITS) | share


def _sizes_of(lanes: Tensor) -> tuple[Tensor, Tensor]:
    """The smaller and the larger size of each group, as shares of the frame's largest |v|."""
    size = lanes >> _SHARE_BITS
    high = ((_ONE - size) << _DROPPED_BITS).view(torch.float32) * (size != _NO_SIZE)
    return (lanes & (_SHARES - 1)) * high * (1 / _SHARES), high
