"""The kernels in Triton, for CUDA tensors: the names, signatures and results of `kernels.reference`."""

from laconic.kernels.gpu.bits import check_sum, set_bits, unpack_bits
from laconic.kernels.gpu.elias_fano import decode_elias_fano, encode_elias_fano
from laconic.kernels.gpu.lanes import pack_lanes, unpack_lanes
from laconic.kernels.gpu.rounding import average_words, largest_magnitudes, quantize_pack, unpack_scale
from laconic.kernels.gpu.selection import all_finite, compact, count_at_least, mean_magnitude
from laconic.kernels.gpu.signs import pack_signs, unpack_signs, vote
from laconic.kernels.gpu.withdraw import withdraw_
from laconic.kernels.reference.residues import (  # models gossip on the host
    compare_residues,
    decode_differences,
    encode_residues,
    largest_changes,
)
from laconic.kernels.reference.rice import decode_rice, encode_rice
from laconic.kernels.reference.sums import add_at_  # a launch of Triton's takes three times as long as index_add_

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
