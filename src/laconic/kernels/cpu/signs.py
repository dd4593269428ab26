"""Signs in one bit each, and the majority of several voters' signs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import words_of
from laconic.kernels.cpu.library import library, num_threads, pointer

_MOST_VOTERS = 2**16 - 1  # the binary digits of a count in signs.cpp


def pack_signs(x: Tensor) -> Tensor:
    words = torch.empty(words_of(x.numel()), dtype=torch.int32)
    library().laconic_pack_signs(pointer("x", x, torch.float32), x.numel(), num_threads(), words.data_ptr())
    return words


def unpack_signs(words: Tensor, n: int, scale: float) -> Tensor:
    x = torch.empty(n, dtype=torch.float32)
    at = pointer("words", words, torch.int32, words_of(n))
    library().laconic_unpack_signs(at, n, scale, num_threads(), x.data_ptr())
    return x


def vote(ballots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if not 1 <= len(ballots) <= _MOST_VOTERS:
        raise KernelError(f"vote was given {len(ballots)} ballots; give 1 to {_MOST_VOTERS}")
    num_words = ballots[0].numel()
    negative = torch.empty_like(ballots[0])
    tie = torch.empty_like(ballots[0])
    at = [pointer("a ballot", ballot, torch.int32, num_words) for ballot in ballots]
    library().laconic_vote(
        (ctypes.c_void_p * len(at))(*at), len(at), num_words, num_threads(), negative.data_ptr(), tie.data_ptr()
    )
    return negative, tie
