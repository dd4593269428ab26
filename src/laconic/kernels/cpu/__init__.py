"""Native kernels for CPU tensors: C++ behind ctypes, with the names and results of the reference."""

from laconic.kernels.cpu.bits import (
    check_sum,
    decode_elias_fano,
    decode_rice,
    encode_elias_fano,
    encode_rice,
    pack_lanes,
    set_bits,
    unpack_bits,
    unpack_lanes,
)
from laconic.kernels.cpu.residues import compare_residues, decode_differences, encode_residues, largest_changes
from laconic.kernels.cpu.rounding import average_words, largest_magnitudes, quantize_pack, unpack_scale
from laconic.kernels.cpu.selection import all_finite, compact, count_at_least, mean_magnitude, withdraw_
from laconic.kernels.cpu.signs import pack_signs, unpack_signs, vote
from laconic.kernels.cpu.sums import add_at_

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
