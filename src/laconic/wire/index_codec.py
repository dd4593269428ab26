"""Codes for k sorted positions out of n."""

from typing import ClassVar, Protocol

from torch import Tensor


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
        """The positions again, int32; FrameError if the words are no code of k positions under n."""
