"""Frozen answers to *how a value is written*, with loss: what the network sees of a float32."""

from laconic.quantize.grid import (
    CODE_BITS,
    Carrier,
    Grid,
    MaxNorm,
    MultiScale,
    Steps,
    carrier_for,
    largest_levels,
    levels_listed,
    levels_of,
    round_up,
)
from laconic.quantize.modulo import (
    Compared,
    Difference,
    Encoded,
    ModuloCode,
    exponents_for,
    is_modulo_code,
    num_blocks,
    steps_of,
)
from laconic.quantize.quantizers import BF16, FP16, Exact, FloatCode, Levels, Lloyd, Quantizer, Sign, Trits

QUANTIZERS: dict[str, type[Quantizer]] = {
    "none": Exact,
    "bf16": BF16,
    "fp16": FP16,
    "sign": Sign,
    "levels": Levels,
    "lloyd": Lloyd,
}
GRIDS: dict[str, type[Grid]] = {"maxnorm": MaxNorm, "multiscale": MultiScale}
MODULO_CODES: dict[str, type[ModuloCode]] = {"modulo": ModuloCode}
