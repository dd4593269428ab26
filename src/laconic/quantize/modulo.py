"""Modulo codes: all that a reader needs of a value who holds nearly the same one, and what it replies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import SchemeError
from laconic.kernels import MODULO_BLOCK, end_to_end
from laconic.quantize.quantizers import Quantizer
from laconic.wire import ValueCode

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_EXPONENTS_PER_OCTAVE = 4  # so that a step is at most a fifth larger than it need be
_SUM_BYTES = 4

_STEPS = np.array(
    [
        math.ldexp(2.0 ** (e % _EXPONENTS_PER_OCTAVE / _EXPONENTS_PER_OCTAVE), e // _EXPONENTS_PER_OCTAVE)
        for e in range(-128, 128)
    ],
    dtype=np.float32,
)


@dataclass(frozen=True)
class Encoded:
    """The message of a worker about its values: their modulo codes, and what those were made with."""

    exponents: Tensor  # int8, of each block's step, on any device
    sums: Tensor  # int32, of each block's quotients
    codes: Tensor  # uint8
    offset: float  # in [0, 1), in steps


@dataclass(frozen=True)
class Compared:
    """The reply of its reader: how far those values are from the reader's own, in steps."""

    peaks: Tensor  # int8, the largest difference of each block; -1 where it was out of reach and nothing moves
    codes: Tensor  # uint8
    offset: float  # the request's own


@dataclass(frozen=True)
class ModuloCode(ValueCode):
    """A value is written as floor(v/step + u) mod 2^bits, with a step for every 256 (after Lu and De Sa, ICML 2020).

    A worker whose values are less than half of 2^bits steps away finds the difference, to a step; that it is so is
    checked by a sum over each block (ours). The offset u, new each time, leaves the difference unbiased. What is
    replied is cut at 2^(bits-2) - 1 steps, at both ends alike; the rest is there to be seen the next time.

    Example:
        >>> scheme = laconic.GossipScheme(quantize=ModuloCode(5))
    """

    code_id = 7
    code_dtype = torch.uint8

    bits: int = 4  # of a code

    def __post_init__(self) -> None:
        if not 3 <= self.bits <= 8:
            raise SchemeError(f"ModuloCode.bits is {self.bits}; give 3 to 8")

    @property
    def half_range(self) -> int:
        """The distance in steps that two values must stay under."""
        return 1 << (self.bits - 1)

    @property
    def answer(self) -> Difference:
        """The code of a difference: in one bit less, which cuts the largest ones."""
        return Difference(self.bits - 1)

    def num_bytes(self, count: int) -> int:
        return num_blocks(count) * (1 + _SUM_BYTES) + -(-count // 8) * self.bits

    def encode(self, values: Tensor, exponents: Tensor, offset: float) -> Encoded:
        """Encode finite float32 values."""
        steps = steps_of(exponents).to(values.device)
        codes, sums = kernels.encode_modulo(values, steps, offset, self.bits)
        return Encoded(exponents, sums, codes, offset)

    def compare(self, values: Tensor, message: Encoded, *, out: Tensor) -> tuple[Tensor, Compared]:
        """(move to the middle, in `out`: (theirs - values)/2 but for rounding and cut; reply for the peer)."""
        steps = steps_of(message.exponents).to(values.device)
        move, codes, peaks = kernels.compare_modulo(
            values, message.codes, message.sums, steps, message.offset, self.bits, out=out
        )
        return move, Compared(peaks, codes, message.offset)

    def write(self, message: Encoded) -> tuple[Tensor, Tensor]:
        """(codes, scale) as a frame has them."""
        return _written(message.offset, message.exponents, message.sums, message.codes)

    def read(self, codes: Tensor, scale: Tensor, count: int) -> Encoded:
        """The inverse; any codes are those of some values."""
        blocks = num_blocks(count)
        exponents, sums, rest = torch.split(codes, [blocks, _SUM_BYTES * blocks, -(-count // 8) * self.bits])
        return Encoded(
            exponents.view(torch.int8),
            sums.clone().view(torch.int32),  # a sum may begin anywhere, its word may not
            rest.contiguous(),
            float(scale),
        )


@dataclass(frozen=True)
class Difference(ValueCode):
    """Whole steps between two values, in so many bits, and each block's peak."""

    code_id = 8
    code_dtype = torch.uint8

    bits: int

    def num_bytes(self, count: int) -> int:
        return num_blocks(count) + -(-count // 8) * self.bits

    def move(self, compared: Compared, exponents: Tensor, *, out: Tensor) -> Tensor:
        """The requester's move to the middle, in `out`: the opposite of its peer's, to the last bit."""
        steps = steps_of(exponents).to(out.device)
        return kernels.decode_differences(compared.codes, steps, out.numel(), self.bits, out=out)

    def write(self, compared: Compared) -> tuple[Tensor, Tensor]:
        """(codes, scale) as a frame has them."""
        return _written(compared.offset, compared.peaks, compared.codes)

    def read(self, codes: Tensor, scale: Tensor, count: int) -> Compared:
        """The inverse."""
        peaks, rest = torch.split(codes, [num_blocks(count), -(-count // 8) * self.bits])
        return Compared(peaks.view(torch.int8), rest.contiguous(), float(scale))


def is_modulo_code(quantize: Quantizer | ModuloCode) -> TypeIs[ModuloCode]:
    """Return whether a reader must hold nearly the same values."""
    return isinstance(quantize, ModuloCode)


def num_blocks(count: int) -> int:
    """The number of steps for so many values."""
    return -(-count // MODULO_BLOCK)


# By numpy, on the host: on the few steps of a small model torch takes four times as long.


def exponents_for(steps: Tensor) -> Tensor:
    """The exponents, int8, of the smallest steps that can be written and are not below these."""
    least = np.ceil(np.log2(np.maximum(steps.numpy(), _STEPS[0])) * _EXPONENTS_PER_OCTAVE)
    return torch.from_numpy(np.minimum(least, 127).astype(np.int8))


def steps_of(exponents: Tensor) -> Tensor:
    """2^(e/4) as float32, the same bits on every machine."""
    return torch.from_numpy(_STEPS[exponents.cpu().numpy().astype(np.intp) + 128])


def _written(offset: float, *parts: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) as a frame has them."""
    rows = [part.to(parts[-1].device).view(torch.uint8) for part in parts]
    return end_to_end(rows), torch.tensor(offset, dtype=torch.float32)
