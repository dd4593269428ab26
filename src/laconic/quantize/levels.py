"""Max-norm levels in a frame: the grid of maxnorm, with a norm of the frame's own."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import SchemeError

_SMALLEST_STEP = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The nearest of n/s * {-s, ..., s}, n being the largest |v| of the frame and s = 2^(bits-1) - 1.

    The grid of maxnorm (Vineeth S, arXiv 2109.12497) where frames are read, not added up in flight: every frame brings
    its norm, and rounding is to the nearest, since what it loses is kept (ours).
    """

    code_id: ClassVar[int] = 6
    code_dtype: ClassVar[torch.dtype] = torch.int32
    adds: ClassVar[bool] = False

    bits: int = 4  # of a code, its sign included

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 12:
            raise SchemeError(f"Levels.bits is {self.bits}; give 2 to 12, or use bf16")

    @property
    def levels(self) -> int:
        """s."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, count: int) -> int:
        return 4 * -(-count * self.bits // 32)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.numel() == 0:
            return values.new_empty(0, dtype=torch.int32), values.new_ones(())
        step = (values.abs().max() * (1 / self.levels)).clamp_min(_SMALLEST_STEP)  # CUDA would not divide by a number
        codes = (values / step).round_().clamp_(-self.levels, self.levels).add_(self.levels)
        return kernels.pack_lanes(codes.to(torch.int32), self.bits), step

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        count = 32 * codes.numel() // self.bits
        lanes = kernels.unpack_lanes(codes[: -(-count * self.bits // 32)], count, self.bits)
        return lanes.to(torch.float32).sub_(self.levels).mul_(scale)
