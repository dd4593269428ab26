"""Two bits a value: its sign, and which of its group's two sizes it is nearer to."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.contract import words_of
from laconic.kernels.cpu.library import library, num_threads, pointer
from laconic.kernels.reference.lloyd import LLOYD_VALUES_PER_WORD, check_lloyd_group


def encode_lloyd(values: Tensor, top: Tensor, group: int) -> tuple[Tensor, Tensor]:
    n = values.numel()
    check_lloyd_group(group)
    lanes = torch.empty(-(-n // group), dtype=torch.int32)
    words = torch.empty(words_of(2 * n), dtype=torch.int32)
    at = pointer("values", values, torch.float32)
    library().laconic_encode_lloyd(at, n, float(top), group, num_threads(), lanes.data_ptr(), words.data_ptr())
    return lanes, words


def decode_lloyd(lanes: Tensor, words: Tensor, top: Tensor, group: int) -> Tensor:
    num_words = words.numel()
    check_lloyd_group(group)
    values = torch.empty(LLOYD_VALUES_PER_WORD * num_words, dtype=torch.float32)
    of_groups = pointer("lanes", lanes, torch.int32, -(-values.numel() // group))
    at = pointer("words", words, torch.int32)
    library().laconic_decode_lloyd(of_groups, at, num_words, float(top), group, num_threads(), values.data_ptr())
    return values
