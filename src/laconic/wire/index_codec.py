"""What an index codec is, every one of them, the choice among them, and the floor they are held against."""

import math
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from laconic.wire.bitmap import Bitmap
from laconic.wire.elias_fano import EliasFano
from laconic.wire.implied import Implied
from laconic.wire.rice import Rice


class IndexCodec(Protocol):
    """A code for sets of positions; one is a file of its own and an entry of INDEX_CODECS."""

    codec_id: ClassVar[int]  # stands in the frame's header

    @staticmethod
    def can_code(n: int, k: int) -> bool:
        """Whether any k positions out of n have a code."""

    @staticmethod
    def num_words(n: int, k: int) -> int | None:
        """The length of the code in 32-bit words; None where it depends on the positions, and not on (n, k) alone."""

    @staticmethod
    def encode(positions: Tensor, n: int) -> Tensor:
        """int32 words for strictly ascending int32 `positions` under n."""

    @staticmethod
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        """The positions again, int32, of each row of words; FrameError if one is no code of k positions under n."""


class PlannedCodec(Protocol):
    """A code for the positions of one plan, of which a selector knows more than their number."""

    codec_id: ClassVar[int]

    def encode(self, positions: Tensor, n: int) -> Tensor: ...

    def decode(self, words: Tensor, n: int, k: int) -> Tensor: ...


INDEX_CODECS: tuple[type[IndexCodec], ...] = (Implied, EliasFano, Bitmap, Rice)  # of equally short ones the first


class IndexBlock(NamedTuple):
    """How the positions of a frame are written, and in how many 32-bit words."""

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
