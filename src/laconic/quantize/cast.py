"""Floating-point types as codes: nothing lost, bf16, fp16."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

# The largest value is brought just under 2^15; fp16 ends at 65504, a little under 2^16.
_FP16_TOP_EXPONENT = 15
# Above these, rounding up would give Inf; the few values there are held at them.
_BF16_TOP = torch.finfo(torch.bfloat16).max
_FP16_TOP = 32752.0 * 2.0**113  # the largest 11-bit number under 2^128


@dataclass(frozen=True, kw_only=True)
class Exact:
    """float32 as it is; an all-reduce adds in the gradient's own type, as DDP does."""

    code_id: ClassVar[int] = 0
    code_dtype: ClassVar[torch.dtype] = torch.float32
    adds: ClassVar[bool] = True

    def num_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values, values.new_ones(())

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes

    def sum_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        return gradient_dtype


@dataclass(frozen=True, kw_only=True)
class BF16:
    """float32's range with 8 bits of precision: never overflows where float32 does not."""

    code_id: ClassVar[int] = 1
    code_dtype: ClassVar[torch.dtype] = torch.bfloat16
    adds: ClassVar[bool] = True

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values.clamp(-_BF16_TOP, _BF16_TOP).to(torch.bfloat16), values.new_ones(())

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.to(torch.float32)

    def sum_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class FP16:
    """11 bits of precision in a narrow range; in frames a power of two per frame moves the values into it.

    An all-reduce cannot carry that scale, so there a mean beyond 65504 becomes Inf, as in PyTorch's own hook.
    """

    code_id: ClassVar[int] = 2
    code_dtype: ClassVar[torch.dtype] = torch.float16
    adds: ClassVar[bool] = True

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.numel() == 0:
            return values.to(torch.float16), values.new_ones(())
        _, exponent = torch.frexp(values.abs().max())  # max < 2^exponent
        # 2^e is built from its bits: pow() may be an ulp off, and then scaling would round.
        biased = (exponent - _FP16_TOP_EXPONENT).clamp(-126, 127) + 127
        scale = (biased.to(torch.int32) << 23).view(torch.float32)
        return (values.clamp(-_FP16_TOP, _FP16_TOP) / scale).to(torch.float16), scale

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.to(torch.float32) * scale

    def sum_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        return torch.float16
