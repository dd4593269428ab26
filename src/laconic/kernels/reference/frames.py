"""Frames of bf16 values behind Rice's code: what owners hear and answer, several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.kernels.reference.bits import check_sum
from laconic.kernels.reference.rice import decode_rice, encode_rice
from laconic.kernels.registry import kernel

HEAD_WORDS, COUNT_AT = 10, 5  # as wire/frame.py has them: the first two are a check sum, and one is the number k
_TOP = torch.finfo(torch.bfloat16).max  # above it rounding would give Inf


class Blocks(NamedTuple):
    """What lies behind the head of such a frame: words of an index, k positions under n, values, the last k there."""

    num_index_words: int
    n: int
    k: int
    num_values: int


@kernel
def write_rice_frames(
    positions: Sequence[Tensor], values: Sequence[Tensor], heads: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Each as (frame, what it says of its values): a head, Rice's code of the positions, the values as bf16.

    Positions are int32 and ascend, one of them or more; values are finite float32. Of a head the check sum and the
    number of positions are put in.
    """
    written = []
    for at, what, head in zip(positions, values, heads, strict=True):
        codes = what.clamp(-_TOP, _TOP).to(torch.bfloat16)
        padded = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(torch.int32)
        words = torch.cat([torch.tensor(head, dtype=torch.int32, device=what.device), encode_rice(at), padded])
        words[COUNT_AT] = at.numel()
        words[:2] = check_sum(words[2:]).view(1).view(torch.int32)
        written.append((words.view(torch.uint8), codes.to(torch.float32)))
    return written


@kernel
def read_rice_frames(frames: Sequence[Tensor], blocks: Sequence[Blocks]) -> list[tuple[Tensor, Tensor]] | None:
    """(positions, values) of each; None where a sum, an index or a value is wrong. Heads are as they should be."""
    found = [_read(frame.view(torch.int32), each) for frame, each in zip(frames, blocks, strict=True)]
    return None if None in found else [each for each in found if each is not None]


def _read(words: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor] | None:
    if int(check_sum(words[2:])) != int(words[:2].view(torch.int64)):
        return None
    index, codes = words[HEAD_WORDS:].tensor_split([blocks.num_index_words])
    positions = decode_rice(index, blocks.n, blocks.k)
    values = codes.view(torch.bfloat16)[: blocks.num_values].to(torch.float32)
    return (positions, values) if positions.numel() == blocks.k and bool(values.isfinite().all()) else None
