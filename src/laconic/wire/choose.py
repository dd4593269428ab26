"""The choice among index codecs, by formula, and the floor they are held against."""

from __future__ import annotations

import math
from functools import lru_cache

from laconic.wire.bitmap import Bitmap
from laconic.wire.elias_fano import EliasFano
from laconic.wire.index_codec import Implied, IndexCodec


@lru_cache(maxsize=1024)  # asked for several times in the life of a frame
def smallest_index_codec(n: int, k: int) -> type[IndexCodec]:
    """The codec whose formula gives the fewest words for k positions out of n."""
    if k in (0, n):
        return Implied
    codecs: tuple[type[IndexCodec], ...] = (EliasFano, Bitmap)
    return min(codecs, key=lambda codec: codec.num_words(n, k))


def floor_bits(n: int, k: int) -> float:
    """log2(C(n, k)): no code for every set of k positions out of n can average less."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
