"""The frozen answer to *how a value is written*."""

from typing import ClassVar, Protocol, runtime_checkable

import torch

from laconic.wire import ValueCodec


@runtime_checkable
class Quantizer(ValueCodec, Protocol):
    """A code of values, which frames hold."""

    adds: ClassVar[bool]  # whether a network can add its codes


@runtime_checkable
class FloatCode(Quantizer, Protocol):
    """A floating-point type, which a network can add."""

    def sum_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        """The type in which an all-reduce adds a gradient of this type."""
