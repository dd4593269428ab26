"""Signs in one bit each, where a one is negative, and the majority of several voters' signs."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import check_vector, words_of

_WORDS = tl.constexpr(128)  # words a program handles, so 4096 entries
_BALLOT_WORDS = tl.constexpr(1024)
_MOST_VOTERS = 255  # eight planes of counters


@triton.jit
def _pack_signs(x, words, n):
    lane = tl.arange(0, 32)[None, :]
    word = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    at = word[:, None] * 32 + lane
    negative = (tl.load(x + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True) < 0).to(tl.int32)
    tl.store(words + word, tl.sum(negative << lane, 1), mask=word * 32 < n)


@triton.jit
def _unpack_signs(words, x, n, scale):
    """The bit becomes the sign bit; Triton's minus is a subtraction from 0, which would make -0 a +0."""
    lane = tl.arange(0, 32)[None, :]
    word = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
    at = word[:, None] * 32 + lane
    bits = tl.load(words + word, mask=word * 32 < n, other=0)
    sign = ((bits[:, None] >> lane) & 1) << 31
    positive = tl.full([_WORDS, 32], scale, tl.float32).to(tl.int32, bitcast=True)
    signed = (sign ^ positive).to(tl.float32, bitcast=True)
    tl.store(x + at, signed, mask=at < n)


@triton.jit
def _add_plane(plane, carry):
    """One bit of 32 counters a word, and what it carries."""
    return plane ^ carry, plane & carry


@triton.jit
def _compare_plane(plane, half, BIT: tl.constexpr, greater, equal):
    """Go on comparing the counters with `half`, from the highest bit down."""
    wanted = -((half >> BIT) & 1)
    return greater | (equal & plane & ~wanted), equal & ~(plane ^ wanted)


@triton.jit(do_not_specialize=["num_voters"])
def _vote(ballots, negative, tie, num_words, num_voters):
    at = tl.program_id(0) * _BALLOT_WORDS + tl.arange(0, _BALLOT_WORDS)
    zero = tl.zeros([_BALLOT_WORDS], tl.int32)
    a = zero
    b = zero
    c = zero
    d = zero
    e = zero
    f = zero
    g = zero
    h = zero
    ballot = ballots + at
    for _ in range(num_voters):
        carry = tl.load(ballot, mask=at < num_words, other=0)
        ballot += num_words
        a, carry = _add_plane(a, carry)
        b, carry = _add_plane(b, carry)
        c, carry = _add_plane(c, carry)
        d, carry = _add_plane(d, carry)
        e, carry = _add_plane(e, carry)
        f, carry = _add_plane(f, carry)
        g, carry = _add_plane(g, carry)
        h, carry = _add_plane(h, carry)
    half = num_voters // 2
    more, same = _compare_plane(h, half, 7, zero, ~zero)
    more, same = _compare_plane(g, half, 6, more, same)
    more, same = _compare_plane(f, half, 5, more, same)
    more, same = _compare_plane(e, half, 4, more, same)
    more, same = _compare_plane(d, half, 3, more, same)
    more, same = _compare_plane(c, half, 2, more, same)
    more, same = _compare_plane(b, half, 1, more, same)
    more, same = _compare_plane(a, half, 0, more, same)
    tl.store(negative + at, more, mask=at < num_words)
    tl.store(tie + at, tl.where(num_voters % 2 == 0, same, 0), mask=at < num_words)


def pack_signs(x: Tensor) -> Tensor:
    """The sign bits of float32 `x`, as int32 words; zero is positive unless it is -0."""
    n = x.numel()
    check_vector(x, torch.float32, n, "x")
    words = torch.empty(words_of(n), dtype=torch.int32, device=x.device)
    if n:
        _pack_signs[(-(-words.numel() // _WORDS.value),)](x, words, n)
    return words


def unpack_signs(words: Tensor, n: int, scale: float) -> Tensor:
    """n float32 entries +scale or -scale, by their bits."""
    check_vector(words, torch.int32, max(words.numel(), words_of(n)), "words")
    x = torch.empty(n, dtype=torch.float32, device=words.device)
    if n:
        _unpack_signs[(-(-words_of(n) // _WORDS.value),)](words, x, n, float(scale))
    return x


def vote(ballots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(negative, tie), words: ones where more than half of the voters' packed signs are ones, and where half are."""
    num_words = ballots[0].numel()
    for ballot in ballots:
        check_vector(ballot, torch.int32, num_words, "a ballot")
    if len(ballots) > _MOST_VOTERS:
        raise KernelError(f"{len(ballots)} voters; give at most {_MOST_VOTERS}, or LACONIC_KERNELS=reference")
    negative = torch.empty_like(ballots[0])
    tie = torch.empty_like(ballots[0])
    if num_words:
        grid = (-(-num_words // _BALLOT_WORDS.value),)
        _vote[grid](torch.stack(list(ballots)), negative, tie, num_words, len(ballots))
    return negative, tie
