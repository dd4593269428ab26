"""Rice's code of the gaps between positions: smaller than Elias-Fano, at a length that depends on them."""

from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.wire.rows import by_rows


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
    @by_rows
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        positions = kernels.decode_rice(words, n, k)
        if positions.numel() != k:
            raise FrameError(f"its index block is no code of {k} positions under {n}")
        return positions
