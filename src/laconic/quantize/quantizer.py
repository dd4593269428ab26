"""The frozen answer to *how a value is written*."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Quantizer(Protocol):
    """float32 values <-> codes on the wire; decode(*encode(v)) is v less what rounding lost."""

    code_id: ClassVar[int]  # stands in the frame's header
    code_dtype: ClassVar[torch.dtype]
    adds: ClassVar[bool]  # whether a network can add its codes

    def num_bytes(self, count: int) -> int:
        """What the codes of so many values take."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, scale): codes of `code_dtype`, scale a 0-d float32. `values` are finite float32."""

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The float32 values that these codes stand for; more than were encoded, where codes share bytes."""


@runtime_checkable
class FloatCode(Quantizer, Protocol):
    """A floating-point type, which a network can add."""

    def sum_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        """The type in which an all-reduce adds a gradient of this type."""
