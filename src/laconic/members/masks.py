"""Sums that a server reads and addends that it cannot: integer codes under pairwise masks.

    s = 2^e ; code_i = round(w_i * d_i / s) ; word_i = code_i + sum over j of +-stream_ij mod 2^bits
    sum of words = sum of codes mod 2^bits ; mean = s * sum of codes

After Bonawitz et al. (1611.04482), without shares of keys: a sum that lacks a member's word for good is void. The
weights w_i sum to 1, so the codes of all members fit `bits`; the exponents e follow from the last mean (both ours).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic import kernels
from laconic.errors import FrameError, SchemeError
from laconic.members.combine import Combine
from laconic.members.messages import Request, Roster
from laconic.scheme import OuterScheme

_Words = NDArray[Any]  # uint8 or uint16, whose sums wrap
_TYPES = {8: (np.uint8, torch.int8), 16: (np.uint16, torch.int16)}
_BLOCK = 512  # entries that share an exponent
_HEADROOM = 4.0  # times the largest |mean|: what members differ in goes beyond it, and what is clipped goes later
_NARROWING = 16.0  # at most, of the largest range between two rounds: a round of zeros says little of the next
_SPREAD = 256.0  # of the largest range to the smallest
_LEAST = 2.0**-10  # range of a model that begins at zero
_MOST_EXPONENT = 100
_CHUNK = 1 << 20  # bytes of a stream at a time
KEY = re.compile("[0-9a-f]{64}")  # a public one, as it is written
_CHECK_BYTES = 8  # of ones behind the codes, whose sum is the number of members where all masks cancel


def check_masks(scheme: OuterScheme, mask_bits: int, combine: Combine) -> None:
    """Refuse what would have to see single drifts; SchemeError."""
    if mask_bits not in _TYPES:
        raise SchemeError(f"masks of {mask_bits} bits do not exist; use {' or '.join(map(str, _TYPES))}")
    if combine.rule != "mean":
        raise SchemeError(f"combine={combine} compares single drifts, which masks hide; use mean")
    if not scheme.exchanged.select.sends_all:
        raise SchemeError(f"{scheme} states which entries it sends, in clear; under masks use one like streaming")


def most_members(mask_bits: int) -> int:
    """How many codes a sum may have, so that half of the levels say what their weights do."""
    return 1 << (mask_bits - 2)


@dataclass(frozen=True)
class SumGrid:
    """The grid of one fragment in one version, which all members and their server know."""

    bits: int
    exponents: Tensor  # int8, of each block's step
    num_entries: int

    @classmethod
    def at(cls, bits: int, anchor: Tensor) -> SumGrid:
        """That of the first round: drifts about as large as the model."""
        ranges = kernels.largest_magnitudes(anchor, _BLOCK)
        return cls(bits, _exponents(ranges, _LEAST, bits), anchor.numel())

    def after(self, mean: Tensor) -> SumGrid:
        """That of the round after one of this mean."""
        ranges = _HEADROOM * kernels.largest_magnitudes(mean, _BLOCK)
        least = self._levels / _NARROWING * 2.0 ** int(self.exponents.max())
        return SumGrid(self.bits, _exponents(ranges, least, self.bits), self.num_entries)

    @classmethod
    def read(cls, bits: int, payload: Tensor, num_entries: int) -> SumGrid:
        """That of a roster; FrameError where it is none."""
        exponents = payload.view(torch.int8)
        is_bounded = bool((exponents.to(torch.int32).abs() <= _MOST_EXPONENT).all())
        if exponents.numel() != -(-num_entries // _BLOCK) or not is_bounded:
            raise FrameError(f"sent {exponents.numel()} exponents for {num_entries} entries")
        return cls(bits, exponents, num_entries)

    def encode(self, values: Tensor, weight: float, num_members: int) -> tuple[_Words, Tensor]:
        """(codes, the values that they stand for): to the nearest level, and clipped at this weight's share of them."""
        unsigned, signed = _TYPES[self.bits]
        most = 1 + int(weight * (self._levels - num_members))  # all of them sum to no more than the levels
        steps = self._steps(values.device)
        codes = _by_block(values, weight / steps).round_().clamp_(-most, most)
        words = np.ones_like(self.zeros())
        words[: self.num_entries] = codes.to(signed).cpu().numpy().view(unsigned)
        return words, _by_block(codes, steps / weight)

    def mean(self, words: _Words, num_members: int, device: torch.device) -> Tensor | None:
        """The weighted mean of so many members' values, from the sum of their words; None where masks are left."""
        if (words[self.num_entries :] != num_members).any():
            return None
        codes = torch.from_numpy(words[: self.num_entries]).view(_TYPES[self.bits][1])
        return _by_block(codes.to(device, torch.float32), self._steps(device))

    def zeros(self) -> _Words:
        """A sum of nothing."""
        return np.zeros(self.num_entries + 8 * _CHECK_BYTES // self.bits, _TYPES[self.bits][0])

    def words(self, payload: Tensor) -> _Words:
        """The words of a member; FrameError where they are none."""
        if payload.numel() != self.zeros().nbytes:
            raise FrameError(
                f"sent {payload.numel()} bytes of codes for {self.num_entries} entries of {self.bits} bits"
            )
        return payload.numpy().view(_TYPES[self.bits][0])

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _steps(self, device: torch.device) -> Tensor:
        """2^e of every block, the same bits on every device."""
        return (self.exponents.to(device, torch.int32) + 127 << 23).view(torch.float32)


def _by_block(values: Tensor, factors: Tensor) -> Tensor:
    """Values times the factor of their block."""
    products = torch.empty_like(values)
    whole = values.numel() // _BLOCK
    stop = whole * _BLOCK
    torch.mul(values[:stop].view(whole, _BLOCK), factors[:whole, None], out=products[:stop].view(whole, _BLOCK))
    torch.mul(values[stop:], factors[whole:], out=products[stop:])
    return products


def _exponents(ranges: Tensor, least: float, bits: int) -> Tensor:
    """The smallest steps whose levels reach over each block's range, none of which is far below the largest."""
    largest = max(float(ranges.max()), least)
    _, exponents = torch.frexp(ranges.cpu().clamp(min=largest / _SPREAD) / ((1 << (bits - 1)) - 1))
    return exponents.clamp(-_MOST_EXPONENT, _MOST_EXPONENT).to(torch.int8)


@dataclass
class OpenSum:
    """What a server has of a sum; no addend of it is kept."""

    roster: Roster
    words: _Words
    announced_at: float
    missing: set[str]  # processes whose words have not come
    requests: dict[int, Request] = field(default_factory=dict)  # by connection: answered once the sum has ended

    def __contains__(self, process: str) -> bool:
        """Whether a process is on the roster."""
        return process in self.roster.numbers

    def add(self, process: str, words: _Words) -> None:
        """Take a process's words."""
        np.add(self.words, words, out=self.words)
        self.missing.discard(process)


class Masks:
    """A member's keys: its own, those of the others, and what it adds to its codes.

    Args:
        bits: Of a code.
        private: 32 bytes that only this process knows.

    Raises:
        SchemeError: `cryptography` is not installed.
    """

    def __init__(self, bits: int, private: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import x25519
        except ImportError:
            raise SchemeError("this server masks drifts; to join it, pip install 'laconic[masks]'") from None
        self.bits = bits
        self._private = x25519.X25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw().hex()
        self._shared: dict[str, bytes] = {}  # by public key

    def add_(self, words: _Words, others: Iterable[str], context: bytes) -> None:
        """Add what cancels in the sum with those of the others, given by public keys, each for the same context."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        others = sorted(others)
        context += "".join(sorted([self.public, *others])).encode()  # who is told of other members has other masks
        zeros, masked = bytes(_CHUNK), words.view(np.uint8)
        secret = os.environ.get("LACONIC_MASK_SECRET", "").encode()
        for other in others:
            pair = "".join(sorted([self.public, other])).encode()  # two spellings of one key are two pairs
            key = HKDF(SHA256(), 32, salt=secret, info=context + pair).derive(self._shared_with(other))
            stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
            apply = np.add if self.public < other else np.subtract
            for start in range(0, masked.size, _CHUNK):
                part = masked[start : start + _CHUNK].view(words.dtype)
                apply(part, np.frombuffer(stream.update(zeros[: part.nbytes]), words.dtype), out=part)

    def _shared_with(self, other: str) -> bytes:
        if other not in self._shared:
            from cryptography.hazmat.primitives.asymmetric import x25519

            try:
                if not KEY.fullmatch(other):
                    raise ValueError(other)
                public = x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(other))
                self._shared[other] = self._private.exchange(public)
            except ValueError:
                raise FrameError(f"sent {other[:16]!r}, which is no public key") from None
        return self._shared[other]


def masked_codes(
    grid: SumGrid, masks: Masks, values: Tensor, tokens: int, roster: Roster, keys: Iterable[str]
) -> tuple[Tensor, Tensor]:
    """(the bytes of a member's words, the values that they stand for); FrameError where a sum would show one drift."""
    others = set(keys) - {masks.public}
    num_members = len(roster.numbers)
    if not 1 <= len(others) == num_members - 1 < most_members(grid.bits) or not 0 < tokens < roster.tokens:
        raise FrameError("asks for a sum that would show a single drift, or one of too many")
    words, moved = grid.encode(values, tokens / roster.tokens, num_members)
    masks.add_(words, others, roster.digest())
    return torch.from_numpy(words.view(np.uint8)), moved
