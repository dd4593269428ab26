"""Bits in int32 words: bit vectors, lanes end to end, Elias-Fano, Rice, check sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import words_of
from laconic.kernels.cpu.library import check_reach, library, pointer


def set_bits(positions: Tensor, num_bits: int) -> Tensor:
    words = _words(num_bits)
    at = pointer("positions", positions, torch.int32)
    outside = library().laconic_set_bits(at, positions.numel(), words.data_ptr(), num_bits)
    if outside:
        raise KernelError(f"{outside} of {positions.numel()} positions are outside; give places among {num_bits} bits")
    return words


def unpack_bits(words: Tensor) -> Tensor:
    at = pointer("words", words, torch.int32)
    count = library().laconic_unpack_bits(at, words.numel(), None, 0)
    positions = torch.empty(count, dtype=torch.int32)
    library().laconic_unpack_bits(at, words.numel(), positions.data_ptr(), count)
    return positions


def pack_lanes(values: Tensor, width: int) -> Tensor:
    words = _words(values.numel() * width)
    at = pointer("values", values, torch.int32)
    library().laconic_pack_lanes(at, values.numel(), width, words.data_ptr())
    return words


def unpack_lanes(words: Tensor, count: int, width: int) -> Tensor:
    values = torch.empty(count, dtype=torch.int32)
    at = pointer("words", words, torch.int32, words_of(count * width))
    library().laconic_unpack_lanes(at, count, width, values.data_ptr())
    return values


def encode_elias_fano(positions: Tensor, width: int, num_high_bits: int) -> Tensor:
    k = positions.numel()
    words = torch.empty(words_of(k * width) + words_of(num_high_bits), dtype=torch.int32)
    at = pointer("positions", positions, torch.int32)
    check_reach(positions, (num_high_bits - k + 1) << width)
    library().laconic_encode_elias_fano(at, k, width, num_high_bits, words.data_ptr())
    return words


def decode_elias_fano(words: Tensor, n: int, k: int, width: int) -> Tensor:
    if words.dim() == 2:
        rows = [decode_elias_fano(row, n, k, width) for row in words]
        return torch.stack(rows) if all(len(row) == k for row in rows) else words.new_empty(len(rows), 0)
    positions = torch.empty(k + 1, dtype=torch.int32)  # one more shows that there were too many
    at = pointer("words", words, torch.int32)
    count = library().laconic_decode_elias_fano(at, words.numel(), n, k, width, positions.data_ptr())
    return positions[:count]


def encode_rice(positions: Tensor) -> Tensor:
    k = positions.numel()
    words = torch.empty(library().laconic_most_rice_words(k), dtype=torch.int32)
    count = library().laconic_encode_rice(pointer("positions", positions, torch.int32), k, words.data_ptr())
    if count < 0:
        raise KernelError("encode_rice of positions that do not ascend; give them sorted, each once, from 0 on")
    return words[:count]


def decode_rice(words: Tensor, n: int, k: int) -> Tensor:
    positions = torch.empty(k, dtype=torch.int32)
    at = pointer("words", words, torch.int32)
    count = library().laconic_decode_rice(at, words.numel(), n, k, positions.data_ptr())
    return positions if count == k else positions[:0]


def check_sum(words: Tensor) -> Tensor:
    if words.dim() == 2:
        return torch.tensor([_check_sum(row) for row in words], dtype=torch.int64)
    return torch.tensor(_check_sum(words), dtype=torch.int64)


def seal_(words: Tensor, head: Sequence[int]) -> None:
    view = words.numpy()
    view[2 : 2 + len(head)] = head
    view[:2] = np.array([_check_sum(words[2:])]).view(np.int32)


def _check_sum(words: Tensor) -> int:
    total: int = library().laconic_check_sum(pointer("words", words, torch.int32), words.numel())
    return total


def _words(num_bits: int) -> Tensor:
    return torch.empty(words_of(num_bits), dtype=torch.int32)
