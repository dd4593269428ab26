"""Words that a network can add: many small integers side by side in each, without carries."""

from dataclasses import dataclass

import torch

from laconic.errors import SchemeError

_WORDS = (torch.int32, torch.int64)  # what Gloo and NCCL both add; neither knows int16, and Gloo adds fp16 4x slower
_WIDEST_LANE_BITS = 16  # from there on bf16 is as small
_WORDS_AT_ONCE = 4  # each lane then begins at a multiple of 16 bytes, which a GPU's thread moves at once


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
        """What one integer takes, unused bits of its word included."""
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
    decides: two stages where they send less than half. Codes of one level are not rounded twice unasked: so rounded
    among 4 workers, a small net diverged at a rate at which it trains well in one stage.
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
