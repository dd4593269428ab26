"""How a value is written, with loss: what the network sees of a float32."""

from laconic.quantize.carrier import Carrier, carrier_for, largest_levels
from laconic.quantize.grid import CODE_BITS, Grid, MaxNorm, MultiScale, Steps, levels_of, round_up
from laconic.quantize.lloyd import Lloyd
from laconic.quantize.quantizers import BF16, FP16, Exact, FloatCode, Levels, Quantizer, Sign, Trits
from laconic.quantize.residue import Difference, Residue, Told, exponents_for, is_residue, num_blocks, steps_of

QUANTIZERS: dict[str, type[Quantizer]] = {
    "none": Exact,
    "bf16": BF16,
    "fp16": FP16,
    "sign": Sign,
    "levels": Levels,
    "lloyd": Lloyd,
}
GRIDS: dict[str, type[Grid]] = {"maxnorm": MaxNorm, "multiscale": MultiScale}
RESIDUES: dict[str, type[Residue]] = {"residue": Residue}
