"""One bit per entry: the smallest fixed-size code once more than about a quarter of the entries go."""

from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError
from laconic.wire.rows import by_rows


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
    @by_rows
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        positions = kernels.unpack_bits(words)  # ascending, and none below zero
        if positions.numel() != k:
            raise FrameError(f"it codes {positions.numel()} positions, not {k}")
        if k and int(positions[-1]) >= n:
            raise FrameError(f"it codes position {int(positions[-1])}, which is not under {n}")
        return positions
