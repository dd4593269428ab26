"""Two bits a value: its sign, and which of its group's two sizes it is nearer to."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import kernel
from laconic.kernels.reference.bits import pack_lanes, unpack_lanes

LLOYD_VALUES_PER_WORD = 16
LLOYD_LARGEST_GROUP = 4096  # as in lloyd.cpp
LLOYD_ROUNDS = 3  # seven would lose 0.74 % of a drift instead of 0.76 %, were sizes not rounded (two-bit-codes)
LLOYD_UNITS = 2.0**40  # of the largest |v|: sums of so many whole numbers are exact in float64, in any order

# The sizes of a group take 12 bits: the larger as a share of the largest |v| of all, the smaller in sixteenths of it.
_SIZE_BITS = 8
LLOYD_SHARE_BITS = 4
_SHARES = 1 << LLOYD_SHARE_BITS
LLOYD_LANE_BITS = _SIZE_BITS + LLOYD_SHARE_BITS
# A size is a float32 in (2^-32, 1] with 3 bits behind the point; its code is how many such floats lie between it and 1.
LLOYD_DROPPED_BITS = 20
LLOYD_ONE = 127 << (23 - LLOYD_DROPPED_BITS)  # the bits of 1.0 that are left
LLOYD_NO_SIZE = (1 << _SIZE_BITS) - 1  # stands for 0


def check_lloyd_group(group: int) -> None:
    """KernelError unless groups of so many values can be coded."""
    if not 0 < group <= LLOYD_LARGEST_GROUP or group % LLOYD_VALUES_PER_WORD:
        raise KernelError(f"a group of {group} values; give a multiple of 16, up to {LLOYD_LARGEST_GROUP}")


@kernel
def encode_lloyd(values: Tensor, top: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(lanes, words) of finite float32 values, of which the largest is `top` > 0: sizes by group, and sixteen codes.

    The two sizes of a group, one int32 lane, are the means of its smaller and larger |v|, parted where each is nearer
    to the mean of its own (Lloyd, IEEE Trans. Inf. Theory 1982), from the mean of all on, in three rounds. A code is a
    bit of the sign, then whether |v| is nearer to the larger size. `group` is a multiple of 16, up to 4096.
    """
    count = values.numel()
    num_groups = -(-count // group)
    units = values.new_zeros(num_groups * group, dtype=torch.float64)
    units[:count] = values.abs().to(torch.float64).mul_(LLOYD_UNITS / top.to(torch.float64)).round_()
    units = units.view(num_groups, group)
    lanes = _lanes_of(*_two_means(units, count))
    low, high = (size.to(torch.float64) * LLOYD_UNITS for size in _sizes_of(lanes))
    is_large = units > ((low + high) / 2).unsqueeze(1)
    codes = (values < 0).to(torch.int32).add_(is_large.view(-1)[:count], alpha=2)
    return lanes, pack_lanes(codes, 2)


@kernel
def decode_lloyd(lanes: Tensor, words: Tensor, top: Tensor, group: int) -> Tensor:
    """The values that codes stand for, sixteen for each word."""
    low, high = _sizes_of(lanes)
    four = torch.stack([low, -low, high, -high], dim=1).mul_(top)
    which = unpack_lanes(words, words.numel() * LLOYD_VALUES_PER_WORD, 2)
    first = torch.arange(0, four.numel(), 4, dtype=torch.int32, device=words.device).repeat_interleave(group)
    return four.view(-1).index_select(0, first[: which.numel()].add_(which))


def _two_means(units: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The means of the smaller and of the larger of each row, of `count` in all; behind those are zeros."""
    per_row = torch.full(units.shape[:1], units.shape[1], dtype=torch.float64, device=units.device)
    per_row[-1:] -= units.numel() - count
    total = units.sum(1)
    low = high = total / per_row
    above = torch.empty_like(units)
    for _ in range(LLOYD_ROUNDS):
        cut = ((low + high) / 2).floor_()  # a whole number is above that where it is above the middle
        torch.sub(units, cut.unsqueeze(1), out=above)
        num_larger = (above > 0).sum(1, dtype=torch.int32)
        larger = above.relu_().sum(1) + cut * num_larger  # a third of the time of a sum under a mask
        low = (total - larger) / (per_row - num_larger)  # the smallest is never among the larger
        high = torch.maximum(low, larger / num_larger.clamp_min(1))  # where all are equal there are none
    return low, high


def _lanes_of(low: Tensor, high: Tensor) -> Tensor:
    """The codes of both sizes of each group, int32."""
    bits = (high / LLOYD_UNITS).to(torch.float32).view(torch.int32)
    size = LLOYD_ONE - ((bits + (1 << (LLOYD_DROPPED_BITS - 1))) >> LLOYD_DROPPED_BITS)
    share = (low / high.clamp_min(1.0) * _SHARES).round_().to(torch.int32).clamp_(max=_SHARES - 1)
    return (size.clamp_(0, LLOYD_NO_SIZE) << LLOYD_SHARE_BITS) | share


def _sizes_of(lanes: Tensor) -> tuple[Tensor, Tensor]:
    """The smaller and the larger size of each group, as shares of the largest |v|."""
    size = lanes >> LLOYD_SHARE_BITS
    high = ((LLOYD_ONE - size) << LLOYD_DROPPED_BITS).view(torch.float32) * (size != LLOYD_NO_SIZE)
    return (lanes & (_SHARES - 1)) * high * (1 / _SHARES), high
