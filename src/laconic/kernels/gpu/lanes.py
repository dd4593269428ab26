"""Lanes of 1 to 31 bits, end to end in int32 words."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.checks import check_vector
from laconic.kernels.gpu.bits import BLOCK, num_blocks, words_of
from laconic.kernels.gpu.launch import launch


@triton.jit(do_not_specialize=["count", "width", "num_words"])
def _pack_lanes(values, words, count, width, num_words):
    """Each word gathers the lanes that touch it, so that no two programs write to one word."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = 32 * word // width
    shift = (lane * width - 32 * word).to(tl.int32)  # the first lane may begin in the word before
    packed = tl.zeros([BLOCK], tl.int32)
    for _ in range(31 // width + 2):
        inside = (word < num_words) & (lane < count) & (shift < 32)
        value = tl.load(values + lane, mask=inside, other=0) & ((1 << width) - 1)
        packed |= tl.where(shift < 0, value >> tl.maximum(-shift, 0), value << (tl.maximum(shift, 0) & 31))
        lane += 1
        shift += width
    tl.store(words + word, packed, mask=word < num_words)


@triton.jit
def lane_at(words, index, width, inside):
    """The lane at each int64 `index`, int32; a lane touches two words at most, and never needs bit 63 of the pair."""
    start = index * width
    shift = start & 31
    low = tl.load(words + (start >> 5), mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(words + (start >> 5) + 1, mask=inside & (shift + width > 32), other=0).to(tl.int64) & 0x7FFFFFFF
    return ((low | (high << 32)) >> shift).to(tl.int32) & ((1 << width) - 1)


@triton.jit(do_not_specialize=["count", "width"])
def _unpack_lanes(words, values, count, width):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + at, lane_at(words, at, width, at < count), mask=at < count)


def pack_into(words: Tensor, values: Tensor, width: int) -> None:
    """Write the low `width` bits of the int32 `values` end to end into `words`, all of which are written."""
    num_words = words.numel()
    if num_words:
        launch(_pack_lanes, (num_blocks(num_words), 1), values, words, values.numel(), width, num_words)


def pack_lanes(values: Tensor, width: int) -> Tensor:
    """Non-negative int32 `values`, each under 2^width and 1 <= width <= 31, end to end."""
    _check_width(width)
    check_vector(values, torch.int32, values.numel(), "values")
    words = values.new_empty(words_of(values.numel() * width))
    pack_into(words, values, width)
    return words


def unpack_lanes(words: Tensor, count: int, width: int) -> Tensor:
    """The inverse of pack_lanes."""
    _check_width(width)
    check_vector(words, torch.int32, max(words.numel(), words_of(count * width)), "words")
    values = words.new_empty(count)
    if count:
        launch(_unpack_lanes, (num_blocks(count), 1), words, values, count, width)
    return values


def _check_width(width: int) -> None:
    if not 1 <= width <= 31:
        raise KernelError(f"lanes are {width} bits wide; give 1 to 31")
