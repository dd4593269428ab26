"""Modulo codes of values that another worker holds nearly alike, and the differences that two of them tell."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels.contract import kernel
from laconic.kernels.reference.rounding import largest_magnitudes

MODULO_BLOCK = 256  # entries that share a step
_LANES = 8  # codes that share whole bytes
_LIMIT = float(0x2AAAAA80)  # a quotient beyond is cut off, to no power of two, so that its sum shows it
_WEIGHT = 2_654_435_767  # of an entry in the sum of its block: its place times this, made odd, mod 2^32


@kernel
def largest_changes(x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """(the largest |x - last|, the largest |x|) of each block of 256 finite entries."""
    return largest_magnitudes(x - last, MODULO_BLOCK), largest_magnitudes(x, MODULO_BLOCK)


@kernel
def encode_modulo(x: Tensor, steps: Tensor, offset: float, bits: int) -> tuple[Tensor, Tensor]:
    """(codes, sums) of finite float32 entries: q mod 2^bits, where q = floor(x/step + offset), and weighted sums of q.

    `steps` has one float32 for every 256 entries, and there is an int32 sum, mod 2^32, for each such block. Eight codes
    take `bits` bytes, the first in the lowest bits; the last eight are filled up with zeros.
    """
    q = _quotients(x, steps, offset)
    return _pack((q & ((1 << bits) - 1)).view(-1)[: x.numel()], bits), _sums(q)


@kernel
def compare_modulo(
    x: Tensor, codes: Tensor, sums: Tensor, steps: Tensor, offset: float, bits: int, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(moves, differences, peaks) for the codes and sums of y: half of the way from x to y, and what y's owner gets.

    d is the difference y - x nearest to zero that the codes allow, in whole steps, and at most 2^(bits-2) - 1 of them;
    a move is d*step/2, and `differences` holds d in bits - 1 bits each, packed like codes. Peaks, int8, are the largest
    differences of each block before the cut. Where one is not the true one the sums disagree, and the block stays as it
    is: zeros, and a peak of -1. Moves are written to `out`, if given.
    """
    half = 1 << (bits - 1)
    q = _quotients(x, steps, offset)
    theirs = torch.zeros_like(q).view(-1)
    theirs[: x.numel()] = _unpack(codes, x.numel(), bits)
    away = ((theirs.view(q.shape) - q + half) & (2 * half - 1)) - half
    away.view(-1)[x.numel() :] = 0
    peaks = away.abs().amax(1)
    alike = (sums == _sums(q + away)) & (peaks < half)
    most = half // 2 - 1
    sent = torch.where(alike.unsqueeze(1), away.clamp(-most, most), 0)
    moves = sent.to(torch.float32) * (steps * 0.5).unsqueeze(1)
    differences = _pack((sent & (half - 1)).view(-1)[: x.numel()], bits - 1)
    return _in(out, moves.view(-1)[: x.numel()]), differences, torch.where(alike, peaks, -1).to(torch.int8)


@kernel
def decode_differences(codes: Tensor, steps: Tensor, n: int, bits: int, *, out: Tensor | None = None) -> Tensor:
    """-d*step/2 for n differences d of so many bits: the opposite, bit for bit, of what their writer moved by.

    In `out`, if given.
    """
    half = 1 << (bits - 1)
    rows = torch.zeros(steps.numel(), MODULO_BLOCK, dtype=torch.float32, device=codes.device)
    rows.view(-1)[:n] = ((_unpack(codes, n, bits) ^ half) - half).to(torch.float32)
    return _in(out, (rows * (steps * -0.5).unsqueeze(1)).view(-1)[:n])


def _in(out: Tensor | None, x: Tensor) -> Tensor:
    return x.clone() if out is None else out.copy_(x)


def _quotients(x: Tensor, steps: Tensor, offset: float) -> Tensor:
    """floor(x/step + offset) in rows of a block, int32; zeros after the last entry."""
    rows = x.new_zeros(steps.numel(), MODULO_BLOCK)
    rows.view(-1)[: x.numel()] = x
    inverse = (1.0 / steps).unsqueeze(1)
    q = (rows * inverse + torch.tensor(offset, dtype=torch.float32)).clamp_(-_LIMIT, _LIMIT).floor_().to(torch.int32)
    q.view(-1)[x.numel() :] = 0
    return q


def _sums(q: Tensor) -> Tensor:
    """Sums in which entries do not make up for each other: two that are wrong by as much, or all of a block, show."""
    weights = _WEIGHT * torch.arange(MODULO_BLOCK, device=q.device) & 0xFFFFFFFF | 1
    total = (q.to(torch.int64) * weights).sum(1) & 0xFFFFFFFF
    return (total - (total >> 31 << 32)).to(torch.int32)


def _pack(q: Tensor, bits: int) -> Tensor:
    lanes = q.new_zeros(-(-q.numel() // _LANES), _LANES, dtype=torch.int64)
    lanes.view(-1)[: q.numel()] = q
    words = (lanes << (bits * torch.arange(_LANES, device=q.device))).sum(1, keepdim=True)
    return (words >> (8 * torch.arange(bits, device=q.device)) & 0xFF).to(torch.uint8).view(-1)


def _unpack(codes: Tensor, count: int, bits: int) -> Tensor:
    octets = codes.view(-1, bits).to(torch.int64)
    words = (octets << (8 * torch.arange(bits, device=codes.device))).sum(1, keepdim=True)
    q = words >> (bits * torch.arange(_LANES, device=codes.device)) & ((1 << bits) - 1)
    return q.view(-1)[:count].to(torch.int32)
