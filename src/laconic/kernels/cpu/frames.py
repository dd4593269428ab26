"""Frames of bf16 values behind Rice's code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.cpu.library import library
from laconic.kernels.cpu.pointer import num_threads, pointer
from laconic.kernels.reference.frames import HEAD_WORDS, Blocks

DO_NOT_ASCEND = "frames of positions that do not ascend; give them sorted, each once, from 0 on"
# Of a frame to be written, and of one to be read, in native/frames.cpp; the last field of each says how it went.
_WRITTEN_FIELDS, _READ_FIELDS, _NUM_WORDS = 8, 9, 1


def write_rice_frames(
    positions: Sequence[Tensor], values: Sequence[Tensor], heads: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    rooms = []
    table = np.zeros((len(heads), _WRITTEN_FIELDS), dtype=np.int64)
    for row, (at, what, head) in enumerate(zip(positions, values, heads, strict=True)):
        k, num_values = at.numel(), what.numel()
        if not 1 <= k <= num_values:
            raise KernelError(f"a frame of {num_values} values at {k} positions; give 1 <= positions <= values")
        words, said = room_for(head, k, num_values), torch.empty_like(what)
        rooms.append((words, said))
        there = pointer("positions", at, torch.int32), pointer("values", what, torch.float32), said.data_ptr()
        table[row, :-1] = words.ctypes.data, 0, k, num_values, *there
    library().laconic_write_frames(table.ctypes.data, len(table), num_threads())
    if not table[:, -1].all():
        raise KernelError(DO_NOT_ASCEND)
    lengths = table[:, _NUM_WORDS].tolist()
    return [(as_frame(words, length), said) for (words, said), length in zip(rooms, lengths, strict=True)]


def read_rice_frames(frames: Sequence[Tensor], blocks: Sequence[Blocks]) -> list[tuple[Tensor, Tensor]] | None:
    positions = [torch.empty(each.k, dtype=torch.int32) for each in blocks]
    values = [torch.empty(each.num_values, dtype=torch.float32) for each in blocks]
    table = np.zeros((len(frames), _READ_FIELDS), dtype=np.int64)
    table[:, :6] = frames_at(frames, blocks)
    table[:, 6:8] = [(at.data_ptr(), what.data_ptr()) for at, what in zip(positions, values, strict=True)]
    library().laconic_read_frames(table.ctypes.data, len(table), num_threads())
    return list(zip(positions, values, strict=True)) if table[:, -1].all() else None


def room_for(head: Sequence[int], k: int, num_values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Words that begin with a head, and have room for any k positions and for the values."""
    most = HEAD_WORDS + library().laconic_most_rice_words(k) + -(-num_values // 2)
    words = np.empty(most, dtype=np.int32)
    words[:HEAD_WORDS] = head
    return words


def as_frame(words: np.ndarray[tuple[int], np.dtype[np.int32]], length: int) -> Tensor:
    """So many words as a frame."""
    return torch.from_numpy(words[:length].view(np.uint8))


def frames_at(frames: Sequence[Tensor], blocks: Sequence[Blocks]) -> list[tuple[int, ...]]:
    """Frames as native code reads them: where, of how many words, and what their blocks are."""
    told: list[tuple[int, ...]] = []
    for frame, each in zip(frames, blocks, strict=True):
        num_words = frame.numel() // 4
        expected = HEAD_WORDS + each.num_index_words + -(-each.num_values // 2)
        if num_words != expected or not 1 <= each.k <= each.num_values:
            raise KernelError(f"a frame of {num_words} words does not hold {each}; give what its head says")
        told.append((pointer("frame", frame, torch.uint8), num_words, *each))
    return told
