"""What a frame asks of the code in which its values are written."""

from typing import ClassVar, Protocol

import torch
from torch import Tensor


class ValueCode(Protocol):
    """Codes of a known type and length; what they mean is for whoever reads them."""

    code_id: ClassVar[int]  # stands in the frame's header
    code_dtype: ClassVar[torch.dtype]

    def num_bytes(self, count: int) -> int:
        """What the codes of so many values take."""


class ValueCodec(ValueCode, Protocol):
    """float32 values <-> codes that stand for them by themselves; decode(*encode(v)) is v less what rounding lost."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, scale): codes of `code_dtype`, scale a 0-d float32. `values` are finite float32."""

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The float32 values that these codes stand for; more than were encoded, where codes share bytes."""
