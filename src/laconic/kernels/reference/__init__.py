"""The definition of every kernel, in plain torch and numpy; CPU and CUDA tensors alike, no Python loop over entries."""

from laconic.kernels.reference.bits import (
    check_sum,
    decode_elias_fano,
    encode_elias_fano,
    pack_lanes,
    set_bits,
    unpack_bits,
    unpack_lanes,
)
from laconic.kernels.reference.residues import compare_residues, decode_differences, encode_residues, largest_changes
from laconic.kernels.reference.rice import decode_rice, encode_rice
from laconic.kernels.reference.rounding import average_words, largest_magnitudes, quantize_pack, unpack_scale
from laconic.kernels.reference.selection import all_finite, compact, count_at_least, mean_magnitude, withdraw_
from laconic.kernels.reference.signs import pack_signs, unpack_signs, vote
from laconic.kernels.reference.sums import add_at_

__all__ = [
    "add_at_",
    "all_finite",
    "average_words",
    "check_sum",
    "compact",
    "compare_residues",
    "count_at_least",
    "decode_differences",
    "decode_elias_fano",
    "decode_rice",
    "encode_elias_fano",
    "encode_residues",
    "encode_rice",
    "largest_changes",
    "largest_magnitudes",
    "mean_magnitude",
    "pack_lanes",
    "pack_signs",
    "quantize_pack",
    "set_bits",
    "unpack_bits",
    "unpack_lanes",
    "unpack_scale",
    "unpack_signs",
    "vote",
    "withdraw_",
]
