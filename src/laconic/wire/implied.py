"""Positions that need no code."""

from typing import ClassVar

import torch
from torch import Tensor


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
        return torch.arange(k, dtype=torch.int32, device=words.device).expand(*words.shape[:-1], k)
