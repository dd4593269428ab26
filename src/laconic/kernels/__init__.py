"""Numerical kernels: one name and signature each, whatever the machine.

`reference` is plain torch, runs on CPU and CUDA tensors, and is the definition. LACONIC_KERNELS names the backend;
one that is asked for by name is used or is an error, never swapped in silence.
"""

import os

from laconic.errors import KernelError
from laconic.kernels.reference import (
    all_finite,
    check_sum,
    pack_lanes,
    set_bits,
    top_k_positions,
    unpack_bits,
    unpack_lanes,
)

__all__ = [
    "all_finite",
    "backend",
    "check_sum",
    "pack_lanes",
    "set_bits",
    "top_k_positions",
    "unpack_bits",
    "unpack_lanes",
]

_BACKENDS = ("reference",)


def backend() -> str:
    """The name of the backend in use, as LACONIC_KERNELS asked for it."""
    asked = os.environ.get("LACONIC_KERNELS", "reference")
    if asked not in _BACKENDS:
        raise KernelError(f"LACONIC_KERNELS is {asked!r}; this build has {', '.join(_BACKENDS)}")
    return asked
