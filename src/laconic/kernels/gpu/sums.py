"""The sum of several sparse frames, and the check sum of one."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.checks import check_vector

_BLOCK = tl.constexpr(1024)
_CHECK_BLOCK = tl.constexpr(4096)


@triton.jit(do_not_specialize=["count", "n"])
def _add_at(total, positions, values, count, n):
    """Positions beyond `total` are left out, as a wrong frame must not write into another tensor."""
    at = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    position = tl.load(positions + at, mask=at < count, other=-1)
    inside = (position >= 0) & (position < n)
    value = tl.load(values + at, mask=at < count, other=0.0)
    tl.store(total + position, tl.load(total + position, mask=inside, other=0.0) + value, mask=inside)


@triton.jit
def _check_sum(words, total, num_words):
    """Integers wrap, so that the order of the atomic additions does not matter."""
    at = tl.program_id(0) * _CHECK_BLOCK + tl.arange(0, _CHECK_BLOCK)
    weighted = tl.load(words + at, mask=at < num_words, other=0) * (2 * at + 1)
    tl.atomic_add(total, tl.sum(weighted.to(tl.int64), 0).to(tl.int32), sem="relaxed")


def add_at_(total: Tensor, positions: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """total[positions[f]] += values[f] for each frame f in turn, so that everyone who adds them gets the same bits.

    Positions are int32, ascending within a frame and under total.numel(); values are float32.
    """
    check_vector(total, torch.float32, total.numel(), "total")
    for at, what in zip(positions, values, strict=True):
        count = at.numel()
        check_vector(at, torch.int32, count, "positions")
        check_vector(what, torch.float32, count, "values")
        if count:
            _add_at[(-(-count // _BLOCK.value),)](total, at, what, count, total.numel())


def check_sum(words: Tensor) -> Tensor:
    """The sum of (2i + 1) * word_i modulo 2^32, as a 0-d int32.

    The weights are odd, so any change of one word changes it, and unequal, so words that change places do too.
    """
    num_words = words.numel()
    check_vector(words, torch.int32, num_words, "words")
    total = torch.zeros((), dtype=torch.int32, device=words.device)
    if num_words:
        _check_sum[(-(-num_words // _CHECK_BLOCK.value),)](words, total, num_words)
    return total
