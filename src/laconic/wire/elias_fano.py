"""Elias-Fano: about 2 + log2(n/k) bits a position, at a length that follows from (n, k)."""

from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError


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
        if positions.shape[-1] != k:
            raise FrameError(f"its index block is no code of {k} ascending positions under {n}")
        return positions

    @staticmethod
    def read(words: Tensor, n: int, k: int, damaged: Tensor) -> Tensor:
        """The same, but `damaged` is set where one is no code, and nothing is waited for."""
        return kernels.read_elias_fano(words, n, k, _low_width(n, k), damaged)


def _words(num_bits: int) -> int:
    return -(-num_bits // 32)


def _num_high_bits(n: int, k: int, width: int) -> int:
    return k + ((n - 1) >> width)


@lru_cache(maxsize=1024)
def _low_width(n: int, k: int) -> int:
    return min(range(31), key=lambda width: k * width + _num_high_bits(n, k, width))
