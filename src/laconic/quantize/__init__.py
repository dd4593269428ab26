"""How a value is written, with loss: what the network sees of a float32."""

from laconic.quantize.cast import BF16, FP16, Exact
from laconic.quantize.quantizer import Quantizer

QUANTIZERS: dict[str, type[Quantizer]] = {"none": Exact, "bf16": BF16, "fp16": FP16}

__all__ = ["BF16", "FP16", "QUANTIZERS", "Exact", "Quantizer"]
