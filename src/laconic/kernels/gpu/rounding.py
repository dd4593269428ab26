"""Integers on a shared grid: norms, rounding and packing in one pass, unpacking and scaling in one pass.

Lane l of word j is entry l * num_words + j, so a program takes a block of words and goes over their lanes. Where each
lane begins at a multiple of 16 bytes a thread moves four neighbours at once, else one, 32 neighbours a warp.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import Key, check_vector
from laconic.kernels.gpu.launch import magnitude_bits

_BLOCK = tl.constexpr(1024)  # words a program handles: four a thread, with eight warps
_UNROLLED = tl.constexpr(4)  # lanes, or rows, whose loads are in flight together
_MEAN_BLOCK = tl.constexpr(256)  # one a thread, as the rows of words begin anywhere
_TILE = 4096  # entries a program reads for the norms of groups up to that
_PART = tl.constexpr(8192)  # of longer ones
_ONE_SCALE = tl.constexpr(0)
_SCALE_EACH = tl.constexpr(1)
_SCALE_PER_GROUP = tl.constexpr(2)
_WIDEST_LANE_BITS = 16  # so that a digit and what rounds it fit 32 bits, and a code a float32's fraction
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # nothing contracts a product and a sum


@triton.jit
def _largest(x, first, n, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """The largest magnitudes of groups, a row each, as bits; NaN counts as Inf."""
    column = tl.arange(0, WIDTH)[None, :]
    at = tl.arange(0, ROWS)[:, None] * GROUP + column
    inside = column < GROUP
    if not WHOLE:
        inside &= at < n - first
    return tl.minimum(tl.max(magnitude_bits(tl.load(x + first + at, mask=inside, other=0.0)), 1), 0x7F800000)


@triton.jit(do_not_specialize=["n", "num_groups"])
def _largest_of_groups(x, largest, n, num_groups, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Only the last program looks where the entries end: a mask would split the loads."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * GROUP)
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if first + ROWS * GROUP <= n:
        tl.store(largest + group, _largest(x, first, n, GROUP, ROWS, WIDTH, True))
    else:
        tl.store(largest + group, _largest(x, first, n, GROUP, ROWS, WIDTH, False), mask=group < num_groups)


@triton.jit(do_not_specialize=["n", "group", "num_parts"])
def _largest_of_parts(x, largest, n, group, num_parts, ALIGNED: tl.constexpr):
    """A part of one group; the order in which programs raise its maximum does not matter."""
    number = tl.program_id(0) // num_parts
    if ALIGNED:
        group = group // 4 * 4  # as it was, but now known to be a multiple
    begin = number.to(tl.int64) * group
    first = begin + (tl.program_id(0) % num_parts).to(tl.int64) * _PART
    end = tl.minimum(begin + group, n)
    at = largest + number + tl.arange(0, 1)
    if first + _PART <= end:
        tl.atomic_max(at, _largest(x, first, end, _PART, 1, _PART, True), sem="relaxed")
    else:
        tl.atomic_max(at, _largest(x, first, end, _PART, 1, _PART, False), sem="relaxed")


@triton.jit
def _drawn(position, key0, key1):
    """The 24-bit draw of each uint32 position, at the top of a uint32, by folded keys."""
    x = position ^ (position >> 16) ^ key0.to(tl.uint32)
    x *= 0x7FEB352D
    x = x ^ (x >> 15) ^ key1.to(tl.uint32)
    x *= 0x846CA68B
    return (x ^ (x >> 16)) & 0xFFFFFF00


@triton.jit
def _first_word(num_words, ALIGNED: tl.constexpr):
    """Where this program's words begin, and their number, as int64."""
    first = tl.program_id(0).to(tl.int64) * _BLOCK
    if ALIGNED:
        return first, (num_words // 4 * 4).to(tl.int64)  # as it was, but now known to be a multiple
    # This adds 0, unknown to the compiler. If the words looked aligned, a thread would take four neighbours of every
    # lane too, in four accesses, and a warp's would not be neighbours.
    return first + (num_words >> 31), num_words.to(tl.int64)


@triton.jit
def _lane(lane, first, n, num_words, WHOLE: tl.constexpr):
    """The first entry of this program's words in a lane, and which of the entries from there on exist."""
    entry = lane * num_words + first
    if WHOLE:
        inside = tl.full([_BLOCK], 1, tl.int1)
    else:
        inside = tl.arange(0, _BLOCK) < tl.minimum(n - entry, num_words - first)
    return entry, inside


@triton.jit
def _scales_at(scales, entry, inside, magic, shift, SCALES: tl.constexpr):
    """The scales of a block of entries, or the one of all; a high product and a shift divide by the group."""
    offset = tl.arange(0, _BLOCK)
    if SCALES == _ONE_SCALE:
        scale = tl.load(scales)
    elif SCALES == _SCALE_EACH:
        scale = tl.load(scales + entry + offset, mask=inside, other=0.0)
    else:
        group = tl.umulhi(entry.to(tl.uint32) + offset.to(tl.uint32), magic.to(tl.uint32)) >> shift.to(tl.uint32)
        scale = tl.load(scales + group, mask=inside, other=0.0)
    return scale


@triton.jit
def _round(value, scale, levels, draw):
    """Signed int32 codes, by scales >= 0. A place over the last level is moved onto it, which is never rounded up."""
    place = tl.minimum(tl.abs(value * scale), levels.to(tl.float32))
    low = tl.floor(place)
    rounded = low + (draw.to(tl.float32) * 2.0**-32 < place - low).to(tl.float32)  # all exact
    sign = value.to(tl.int32, bitcast=True) & -0x80000000
    signed = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return (signed + 1.5 * 2.0**23).to(tl.int32, bitcast=True) - 0x4B400000  # a conversion has a quarter of the rate


@triton.jit
def _pack_block(
    x, scales, words, n, num_words, first, levels, magic, shift, key0, key1,
    LANE_BITS: tl.constexpr, LANES: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    offset = tl.arange(0, _BLOCK)
    packed = tl.zeros([_BLOCK], words.dtype.element_ty)
    for below in tl.range(LANES, loop_unroll_factor=_UNROLLED):  # from the highest lane down
        entry, inside = _lane(LANES - 1 - below, first, n, num_words, WHOLE)
        value = tl.load(x + entry + offset, mask=inside, other=0.0)
        scale = _scales_at(scales, entry, inside, magic, shift, SCALES)
        draw = _drawn(entry.to(tl.uint32) + offset.to(tl.uint32), key0, key1)
        packed = (packed << LANE_BITS) + _round(value, scale, levels, draw)
    tl.store(words + first + offset, packed, mask=_lane(0, first, num_words, num_words, WHOLE)[1])


@triton.jit(do_not_specialize=["n", "num_words", "levels", "magic", "shift", "key0", "key1"])
def _quantize_pack(
    x, scales, words, n, num_words, levels, magic, shift, key0, key1,
    LANE_BITS: tl.constexpr, LANES: tl.constexpr, SCALES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Only programs at the end look where the entries end: a mask would split the loads."""
    first, num_words = _first_word(num_words, ALIGNED)
    if (LANES - 1) * num_words + first + _BLOCK <= n:
        _pack_block(x, scales, words, n, num_words, first, levels, magic, shift, key0, key1,
                    LANE_BITS, LANES, SCALES, True)  # fmt: skip
    else:
        _pack_block(x, scales, words, n, num_words, first, levels, magic, shift, key0, key1,
                    LANE_BITS, LANES, SCALES, False)  # fmt: skip


@triton.jit
def _digit(word, lane, LANE_BITS: tl.constexpr):
    """The digit of a lane plus half its range: the reference's shift that rounds, both halves added before it."""
    unit = tl.full([], 1, word.dtype) << lane * LANE_BITS
    return ((word + ((unit >> 1) + (unit << LANE_BITS - 1))) >> lane * LANE_BITS).to(tl.int32) & ((1 << LANE_BITS) - 1)


@triton.jit
def _unpack_block(
    words, scales, x, n, num_words, first, magic, shift,
    LANE_BITS: tl.constexpr, LANES: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    offset = tl.arange(0, _BLOCK)
    word = tl.load(words + first + offset, mask=_lane(0, first, num_words, num_words, WHOLE)[1], other=0)
    for lane in tl.range(LANES, loop_unroll_factor=_UNROLLED):
        entry, inside = _lane(lane, first, n, num_words, WHOLE)
        code = _digit(word, lane, LANE_BITS) - (1 << (LANE_BITS - 1))
        scale = _scales_at(scales, entry, inside, magic, shift, SCALES)
        tl.store(x + entry + offset, code.to(tl.float32) * scale, mask=inside)


@triton.jit(do_not_specialize=["n", "num_words", "magic", "shift"])
def _unpack_scale(
    words, scales, x, n, num_words, magic, shift,
    LANE_BITS: tl.constexpr, LANES: tl.constexpr, SCALES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    first, num_words = _first_word(num_words, ALIGNED)
    if (LANES - 1) * num_words + first + _BLOCK <= n:
        _unpack_block(words, scales, x, n, num_words, first, magic, shift, LANE_BITS, LANES, SCALES, True)
    else:
        _unpack_block(words, scales, x, n, num_words, first, magic, shift, LANE_BITS, LANES, SCALES, False)


@triton.jit(do_not_specialize=["num_rows", "num_words", "key0", "key1"])
def _average_words(words, means, num_rows, num_words, key0, key1, LANE_BITS: tl.constexpr, LANES: tl.constexpr):
    """Each lane reads the rows again, from the cache. Half a digit's range on top keeps the quotient's floor simple."""
    at = tl.program_id(0).to(tl.int64) * _MEAN_BLOCK + tl.arange(0, _MEAN_BLOCK)
    packed = tl.zeros([_MEAN_BLOCK], words.dtype.element_ty)
    for below in range(LANES):  # from the highest lane down
        lane = LANES - 1 - below
        total = tl.zeros([_MEAN_BLOCK], tl.int32)
        row = words + at
        for _ in tl.range(num_rows, loop_unroll_factor=_UNROLLED):
            total += _digit(tl.load(row, mask=at < num_words, other=0), lane, LANE_BITS)
            row += num_words
        draw = _drawn((lane * num_words.to(tl.int64) + at).to(tl.uint32), key0, key1)
        lift = tl.umulhi(draw, num_rows.to(tl.uint32)).to(tl.int32)
        code = (total + lift) // num_rows - (1 << (LANE_BITS - 1))
        packed = (packed << LANE_BITS) + code
    tl.store(means + at, packed, mask=at < num_words)


def largest_magnitudes(x: Tensor, group: int) -> Tensor:
    n = x.numel()
    num_groups = -(-x.numel() // group)
    check_vector(x, torch.float32, n, "x")
    if n == 0:
        return x.new_zeros(0)
    if num_groups > 1 and group <= _TILE:
        bits = torch.empty(num_groups, dtype=torch.int32, device=x.device)
        width = 1 << (group - 1).bit_length()
        grid = (-(-num_groups * width // _TILE),)
        _largest_of_groups[grid](x, bits, n, num_groups, group, _TILE // width, width, **_OPTIONS)
    else:
        bits = torch.zeros(num_groups, dtype=torch.int32, device=x.device)
        group = group if num_groups > 1 else -(-n // 4) * 4  # one group may as well end at a multiple
        num_parts = -(-group // _PART.value)
        _largest_of_parts[(num_groups * num_parts,)](x, bits, n, group, num_parts, group % 4 == 0, **_OPTIONS)
    return bits.view(torch.float32)


def quantize_pack(
    x: Tensor, inverse: Tensor, group: int, levels: int, lane_bits: int, num_words: int, dtype: torch.dtype, key: Key
) -> Tensor:
    n = x.numel()
    lanes = _num_lanes(dtype, lane_bits)
    check_vector(x, torch.float32, n, "x")
    if n > num_words * lanes:
        raise KernelError(f"{n} codes of {lane_bits} bits do not fit {num_words} words of {dtype}; give more words")
    if n == 0:
        return torch.zeros(num_words, dtype=dtype, device=x.device)
    magic, shift, scales = division("inverse", inverse, group, n)
    words = torch.empty(num_words, dtype=dtype, device=x.device)
    aligned = num_words % 4 == 0 and x.data_ptr() % 16 == 0
    numbers = n, num_words, levels, magic, shift, *_folded(key)
    grid = (-(-num_words // _BLOCK.value),)
    _quantize_pack[grid](x, inverse, words, *numbers, lane_bits, lanes, scales, aligned, **_OPTIONS)
    return words


def unpack_scale(words: Tensor, count: int, lane_bits: int, step: Tensor, group: int) -> Tensor:
    num_words = words.numel()
    lanes = _num_lanes(words.dtype, lane_bits)
    check_vector(words, words.dtype, num_words, "words")
    if not 0 <= count <= num_words * lanes:
        raise KernelError(f"{num_words} words of {words.dtype} do not hold {count} codes; give their own count")
    x = torch.empty(count, dtype=torch.float32, device=words.device)
    if count:
        magic, shift, scales = division("step", step, group, count)
        aligned = num_words % 4 == 0 and words.data_ptr() % 16 == 0
        numbers = count, num_words, magic, shift
        grid = (-(-num_words // _BLOCK.value),)
        _unpack_scale[grid](words, step, x, *numbers, lane_bits, lanes, scales, aligned, **_OPTIONS)
    return x


def average_words(words: Tensor, lane_bits: int, key: Key) -> Tensor:
    (num_rows, num_words) = words.shape
    lanes = _num_lanes(words.dtype, lane_bits)
    check_vector(words, words.dtype, num_rows * num_words, "words", dims=2)
    most = (1 << (31 - lane_bits)) - 1  # so that totals fit 31 bits
    if not 1 <= num_rows <= most:
        raise KernelError(f"{num_rows} rows of {lane_bits}-bit lanes; give 1 to {most}, or LACONIC_KERNELS=reference")
    means = torch.empty(num_words, dtype=words.dtype, device=words.device)
    if num_words:
        grid = (-(-num_words // _MEAN_BLOCK.value),)
        _average_words[grid](words, means, num_rows, num_words, *_folded(key), lane_bits, lanes, **_OPTIONS)
    return means


def _num_lanes(dtype: torch.dtype, lane_bits: int) -> int:
    if dtype not in (torch.int32, torch.int64):
        raise KernelError(f"words are {dtype}; give torch.int32 or torch.int64")
    if not 1 <= lane_bits <= _WIDEST_LANE_BITS:
        raise KernelError(f"lanes are {lane_bits} bits wide; give 1 to {_WIDEST_LANE_BITS}")
    return dtype.itemsize * 8 // lane_bits


def division(name: str, scales: Tensor, group: int, count: int) -> tuple[int, int, int]:
    """(magic, shift, what the scales are): i // group == i * (magic + 2^32) >> 32 + shift, for 0 <= i < 2^31.

    With 2^shift < group <= 2^(shift + 1) the magic number takes 32 bits, and exceeds 2^(32 + shift) / group by less
    than 1: an error under i / 2^(32 + shift) < 1 / group (Granlund and Montgomery, PLDI 1994).
    """
    check_vector(scales, torch.float32, 1 if scales.numel() == 1 else -(-count // group), name)
    if count > 1 << 31:
        raise KernelError(f"there are {count} entries; give at most 2^31 at once")
    if scales.numel() == 1 or group == 1:
        return 0, 0, int((_ONE_SCALE if scales.numel() == 1 else _SCALE_EACH).value)
    shift = (group - 1).bit_length() - 1
    return -(-(1 << 32 + shift) // group) - (1 << 32), shift, int(_SCALE_PER_GROUP.value)


def _folded(key: Key) -> Key:
    """(x ^ k) ^ (x ^ k) >> s is x ^ x >> s ^ k ^ k >> s; this is the part of k, which saves an operation a draw."""
    return key[0] ^ (key[0] >> 16 & 0xFFFF), key[1] ^ (key[1] >> 15 & 0x1FFFF)
