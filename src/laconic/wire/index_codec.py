"""Codes for k sorted positions out of n."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from laconic.errors import FrameError


class IndexCodec(Protocol):
    """A code whose length follows from (n, k) alone, so that no sizes are exchanged."""

    codec_id: ClassVar[int]  # stands in the frame's header

    @staticmethod
    def num_words(n: int, k: int) -> int:
        """The length of the code in 32-bit words."""

    @staticmethod
    def encode(positions: Tensor, n: int) -> Tensor:
        """int32 words for strictly ascending int32 `positions` under n."""

    @staticmethod
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        """The positions again, int32; FrameError if the words are no code of k positions under n."""


class Implied:
    """No position is free to choose (k = 0 or k = n), so nothing is written."""

    codec_id: ClassVar[int] = 0

    @staticmethod
    def num_words(n: int, k: int) -> int:
        return 0

    @staticmethod
    def encode(positions: Tensor, n: int) -> Tensor:
        return torch.empty(0, dtype=torch.int32, device=positions.device)

    @staticmethod
    def decode(words: Tensor, n: int, k: int) -> Tensor:
        return torch.arange(k, dtype=torch.int32, device=words.device)


def checked_positions(positions: Tensor, n: int, k: int) -> Tensor:
    """`positions` if they are k strictly ascending numbers in [0, n)."""
    if positions.numel() != k:
        raise FrameError(f"it codes {positions.numel()} positions, not {k}")
    if k and (int(positions[-1]) >= n or int(positions[0]) < 0 or bool((positions[1:] <= positions[:-1]).any())):
        raise FrameError(f"its positions are not ascending numbers under {n}")
    return positions
