"""Signs: one bit each, or a trit where there may be none."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels

_TRITS_PER_BYTE = 5  # 3^5 = 243
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Sign:
    """sign(v) in one bit, with mean|v| of the frame as the size of all of them (Seide et al., Interspeech 2014).

    A server that takes a vote looks at the bits alone (Bernstein et al., ICML 2018). A zero is written as positive.
    """

    code_id: ClassVar[int] = 3
    code_dtype: ClassVar[torch.dtype] = torch.int32
    adds: ClassVar[bool] = False

    def num_bytes(self, count: int) -> int:
        return 4 * -(-count // 32)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.numel() == 0:
            return values.new_empty(0, dtype=torch.int32), values.new_ones(())
        return kernels.pack_signs(values.contiguous()), _mean_size(values)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return kernels.unpack_signs(codes, 32 * codes.numel(), float(scale))


@dataclass(frozen=True, kw_only=True)
class Marks:
    """No value at all: a frame that says only where."""

    code_id: ClassVar[int] = 5
    code_dtype: ClassVar[torch.dtype] = torch.uint8
    adds: ClassVar[bool] = False

    def num_bytes(self, count: int) -> int:
        return 0

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values.new_empty(0, dtype=torch.uint8), values.new_ones(())

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.to(torch.float32)


def _mean_size(values: Tensor) -> Tensor:
    """mean|v|, never zero, and in float64 on the way: the sum of two large float32 would be Inf."""
    return values.abs().mean(dtype=torch.float64).to(torch.float32).clamp_min(_SMALLEST_SCALE)


@dataclass(frozen=True, kw_only=True)
class Trits:
    """Votes -1, 0 and 1 in base 3, five to a byte: 1.6 bits each; less than a map once six in ten are not zero."""

    code_id: ClassVar[int] = 4
    code_dtype: ClassVar[torch.dtype] = torch.uint8
    adds: ClassVar[bool] = False

    def num_bytes(self, count: int) -> int:
        return -(-count // _TRITS_PER_BYTE)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        digits = values.new_zeros(self.num_bytes(values.numel()) * _TRITS_PER_BYTE, dtype=torch.uint8)
        digits[: values.numel()] = (values + 1).to(torch.uint8)
        return (digits.view(-1, _TRITS_PER_BYTE) * self._weights(values)).sum(1, dtype=torch.uint8), values.new_ones(())

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        digits = torch.div(codes.unsqueeze(1), self._weights(codes), rounding_mode="floor") % 3
        return digits.view(-1).to(torch.float32) - 1

    def _weights(self, like: Tensor) -> Tensor:
        return torch.tensor([3**place for place in range(_TRITS_PER_BYTE)], dtype=torch.uint8, device=like.device)
