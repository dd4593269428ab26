"""Several codes at once."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

Decode = Callable[[Tensor, int, int], Tensor]


def by_rows(decode: Decode) -> Decode:
    """A codec's `decode` that also takes rows of words, one after the other."""

    @wraps(decode)
    def decoded(words: Tensor, n: int, k: int) -> Tensor:
        return decode(words, n, k) if words.dim() == 1 else torch.stack([decode(row, n, k) for row in words])

    return decoded
