"""The kernels in Triton, for CUDA tensors: the names, signatures and results of `kernels.reference`."""

from laconic.kernels import reference
from laconic.kernels.contract import kernels_in

TAKEN_FROM_REFERENCE = {
    "draw_distinct_": "the host draws, while the GPU computes",
    "add_at_": "a launch of Triton's takes three times as long as index_add_",
    "encode_rice": "torch's own operations write and read it",
    "decode_rice": "torch's own operations write and read it",
    "write_rice_frames": "torch's own operations write and read it",
    "read_rice_frames": "torch's own operations write and read it",
    "write_parts": "torch's own operations write and read it",
    "read_answers": "torch's own operations write and read it",
    "owe_": "torch's own operations run at a copy's speed",
    "join_": "torch's own operations run at a copy's speed",
}

globals().update(kernels_in(__name__, TAKEN_FROM_REFERENCE))
