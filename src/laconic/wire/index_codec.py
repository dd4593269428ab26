"""Index codecs: sets of positions as words; the choice among them, and the floor they are held against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.kernels import repeated


class Implied:
    """No position is free to choose (k = 0 or k = n), so nothing is written."""

    codec_id: ClassVar[int] = 0

    @staticmethod
    def can_code(n: int, k: int) -> bool:
        return k in (0, n)

    @staticmethod
    def num_words(n: int, k: int) -> int:
        return 0

    @staticmethod
    def encode(positions: Tensor, n: int) -> Tensor:
        return torch.empty(0, dtype=torch.int32, device=positions.device)

    @staticmethod
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        return torch.arange(k, dtype=torch.int32, device=words.device)


class EliasFano:
    """Low l bits of each position as they are; high bits as ones at (p_i >> l) + i in a bit vector (Elias, JACM 1974).

    The vector has k ones and (n-1 >> l) possible gaps, so its length is k + (n-1 >> l) bits. l is the width
    that makes the whole shortest.
    """

    codec_id: ClassVar[int] = 2

    @staticmethod
    def can_code(n: int, k: int) -> bool:
        return k > 0

    @staticmethod
    def num_words(n: int, k: int) -> int:
        width = _low_width(n, k)
        return _words(k * width) + _words(_num_high_bits(n, k, width))

    @staticmethod
    def encode(positions: Tensor, n: int) -> Tensor:
        k = positions.numel()
        width = _low_width(n, k)
        return kernels.encode_elias_fano(positions, width, _num_high_bits(n, k, width))

    @staticmethod
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        positions = kernels.decode_elias_fano(words, n, k, _low_width(n, k))
        if positions.numel() != k:
            raise FrameError(f"its index block is no code of {k} ascending positions under {n}")
        return positions

    @staticmethod
    def read(words: Tensor, n: int, k: int, damaged: Tensor) -> Tensor:
        """The same of each row of words, but `damaged` is set where one is no code, and nothing is waited for."""
        return kernels.read_elias_fano(words, n, k, _low_width(n, k), damaged)


def _words(num_bits: int) -> int:
    return -(-num_bits // 32)


def _num_high_bits(n: int, k: int, width: int) -> int:
    return k + ((n - 1) >> width)


@lru_cache(maxsize=1024)
def _low_width(n: int, k: int) -> int:
    return min(range(31), key=lambda width: k * width + _num_high_bits(n, k, width))


class Bitmap:
    """Bit i is one if position i is sent: n bits whatever k is."""

    codec_id: ClassVar[int] = 1

    @staticmethod
    def can_code(n: int, k: int) -> bool:
        return True

    @staticmethod
    def num_words(n: int, k: int) -> int:
        return -(-n // 32)

    @staticmethod
    def encode(positions: Tensor, n: int) -> Tensor:
        return kernels.set_bits(positions, n)

    @staticmethod
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        positions = kernels.unpack_bits(words)  # ascending, and none below zero
        if positions.numel() != k:
            raise FrameError(f"it codes {positions.numel()} positions, not {k}")
        if k and int(positions[-1]) >= n:
            raise FrameError(f"it codes position {int(positions[-1])}, which is not under {n}")
        return positions


class Rice:
    """Gaps in as many bits as their neighbours take: every 64 have a width of their own.

    Gradients are dense in some rows of a matrix and empty in others, and the largest tenth of a CNN's then takes 3.4
    bits a position, under the 4.7 bits that any code needs for positions without a pattern. For frames whose length
    need not be known beforehand.
    """

    codec_id: ClassVar[int] = 3

    @staticmethod
    def can_code(n: int, k: int) -> bool:
        return 0 < k < n

    @staticmethod
    def num_words(n: int, k: int) -> None:
        return None

    @staticmethod
    def encode(positions: Tensor, n: int) -> Tensor:
        return kernels.encode_rice(positions)

    @staticmethod
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        positions = kernels.decode_rice(words, n, k)
        if positions.numel() != k:
            raise FrameError(f"its index block is no code of {k} positions under {n}")
        return positions


class IndexCodec(Protocol):
    """A code for sets of positions; a class of this file, and an entry of INDEX_CODECS."""

    codec_id: ClassVar[int]  # stands in the frame's header

    @staticmethod
    def can_code(n: int, k: int) -> bool:
        """Return whether any k positions out of n have a code."""

    @staticmethod
    def num_words(n: int, k: int) -> int | None:
        """The length of the code in 32-bit words; None where it depends on the positions, and not on (n, k) alone."""

    @staticmethod
    def encode(positions: Tensor, n: int) -> Tensor:
        """int32 words for strictly ascending int32 `positions` under n."""

    @staticmethod
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        """The positions again, int32; FrameError if the words are no code of k positions under n."""


class PlannedCodec(Protocol):
    """A code for the positions of one plan, of which a selector knows more than their number."""

    codec_id: ClassVar[int]

    def encode(self, positions: Tensor, n: int) -> Tensor: ...

    def decode(self, words: Tensor, n: int, k: int) -> Tensor: ...


INDEX_CODECS: tuple[type[IndexCodec], ...] = (Implied, EliasFano, Bitmap, Rice)  # of equally short ones the first


class IndexBlock(NamedTuple):
    """The code of a frame's positions, and its number of 32-bit words."""

    codec: type[IndexCodec] | PlannedCodec
    num_words: int


@lru_cache(maxsize=1024)  # asked for several times in the life of a frame
def foretold_block(n: int, k: int) -> IndexBlock:
    """The shortest of those whose length follows from (n, k) alone, so that no sizes are exchanged."""
    codec = smallest_index_codec(n, k)
    return IndexBlock(codec, codec.num_words(n, k) or 0)


def smallest_index_codec(n: int, k: int) -> type[IndexCodec]:
    """The codec whose formula gives the fewest words for k positions out of n."""
    lengths = {codec: codec.num_words(n, k) for codec in INDEX_CODECS if codec.can_code(n, k)}
    return min((codec for codec in lengths if lengths[codec] is not None), key=lambda codec: lengths[codec] or 0)


def floor_bits(n: int, k: int) -> float:
    """log2(C(n, k)): no code for every set of k positions out of n can average less."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@dataclass(frozen=True)
class Runs:
    """The numbers of the runs, in the shortest code whose length is foretold: about 2 + log2(n/k) bits a run.

    Every span is cut into runs of `length` entries, of which the last may be shorter. All runs of a bucket are numbered
    in order, and `num_selected` of them go, as every worker knows beforehand.
    """

    codec_id: ClassVar[int] = 4

    spans: tuple[tuple[int, int], ...]  # (start, stop), ascending
    length: int
    num_selected: int

    @property
    def index_block(self) -> IndexBlock:
        """The code of a frame's positions, and its number of words."""
        return IndexBlock(self, foretold_block(self._num_runs, self.num_selected).num_words)

    def encode(self, positions: Tensor, n: int) -> Tensor:
        starts, _ = _runs(self.spans, self.length, positions.device)
        numbers = torch.searchsorted(starts, positions, right=True, out_int32=True) - 1
        selected = numbers[starts[numbers] == positions]  # of each run its first position alone
        return foretold_block(self._num_runs, self.num_selected).codec.encode(selected, self._num_runs)

    def decode(self, words: Tensor, n: int, k: int) -> Tensor:
        codec = foretold_block(self._num_runs, self.num_selected).codec
        numbers = codec.decode(words, self._num_runs, self.num_selected)
        starts, counts = (table[numbers] for table in _runs(self.spans, self.length, numbers.device))
        ends = counts.cumsum(0, dtype=torch.int32)
        if int(ends[-1]) != k:
            raise FrameError(f"its runs hold {int(ends[-1])} positions, not {k}")
        return repeated(starts - ends + counts, counts, k) + torch.arange(k, dtype=torch.int32, device=numbers.device)

    @property
    def _num_runs(self) -> int:
        return sum(-(-(stop - start) // self.length) for start, stop in self.spans)


@lru_cache(maxsize=1024)
def _runs(spans: tuple[tuple[int, int], ...], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The starts of all runs, and their numbers of entries, int32."""
    starts = [torch.arange(start, stop, length, dtype=torch.int32, device=device) for start, stop in spans]
    counts = [(stop - at).clamp_(max=length) for at, (_, stop) in zip(starts, spans, strict=True)]
    return torch.cat(starts), torch.cat(counts)
