"""The native library: one shared object per instruction set, the widest that this machine has; tensors as pointers."""

from __future__ import annotations

import ctypes
import platform
import threading
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.contract import check_vector

# x86-64 levels, widest first, with the flags of /proc/cpuinfo that they ask for. One shared object for several levels
# would share the standard library's weak symbols, and an older machine might be given a newer one's code.
_LEVELS = (
    ("v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("v3", {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("v2", {"sse4_2", "ssse3", "popcnt"}),
)


class Facts(ctypes.Structure):
    """The facts that a withdrawal notes."""

    _fields_ = (
        ("mean", ctypes.c_double),
        ("kth", ctypes.c_double),
        ("caught", ctypes.c_int64),
        ("passes", ctypes.c_int64),
    )


INTERFACE = 9  # as in native/interface.cpp
_P = ctypes.c_void_p
_N = ctypes.c_int64
_INT = ctypes.c_int
_U = ctypes.c_uint32
_F = ctypes.c_float

SIGNATURES = {
    "withdraw": (None, (_P, _P, _F, _N, _N, _F, _INT, _P, _P, ctypes.POINTER(Facts))),
    "all_finite": (_INT, (_P, _N, _INT)),
    "sum_magnitudes": (ctypes.c_double, (_P, _N, _INT)),
    "count_at_least": (None, (_P, _N, _P, _N, _INT, _P)),
    "set_bits": (_N, (_P, _N, _P, _N)),
    "unpack_bits": (_N, (_P, _N, _P, _N)),
    "pack_lanes": (None, (_P, _N, _INT, _P)),
    "unpack_lanes": (None, (_P, _N, _INT, _P)),
    "encode_elias_fano": (None, (_P, _N, _INT, _N, _P)),
    "decode_elias_fano": (_N, (_P, _N, _N, _N, _INT, _P)),
    "most_rice_words": (_N, (_N,)),
    "encode_rice": (_N, (_P, _N, _P)),
    "decode_rice": (_N, (_P, _N, _N, _N, _P)),
    "write_frames": (None, (_P, _N, _INT)),
    "read_frames": (None, (_P, _N, _INT)),
    "write_parts": (_INT, (_P, _P, _P, _P, _N, _P, _N, _N, _INT, _P, _P, _P)),
    "read_answers": (_INT, (_P, _N, _P, _P, _N, _INT, _P, _P)),
    "take_mean": (_N, (_P, _N, _P, _N, _P, _P, _P, _N, _P, _N, _P, _N, _INT, _P, _P, ctypes.POINTER(Facts))),
    "owe": (None, (_P, _P, _N, _P, _N, _P, _P, _F)),
    "largest_changes": (None, (_P, _P, _N, _INT, _P, _P)),
    "encode_modulo": (None, (_P, _N, _P, _F, _INT, _INT, _P, _P)),
    "compare_modulo": (None, (_P, _N, _P, _P, _P, _F, _INT, _INT, _P, _P, _P)),
    "decode_differences": (None, (_P, _N, _P, _INT, _INT, _P)),
    "encode_lloyd": (None, (_P, _N, _F, _N, _INT, _P, _P)),
    "decode_lloyd": (None, (_P, _P, _N, _F, _N, _INT, _P)),
    "check_sum": (_N, (_P, _N)),
    "pack_signs": (None, (_P, _N, _INT, _P)),
    "unpack_signs": (None, (_P, _N, _F, _INT, _P)),
    "vote": (None, (_P, _N, _N, _INT, _P, _P)),
    "largest_magnitudes": (None, (_P, _N, _N, _INT, _P)),
    "quantize_pack": (None, (_P, _N, _P, _N, _N, ctypes.c_int32, _INT, _U, _U, _INT, _P, _N, _INT)),
    "unpack_scale": (None, (_P, _N, _INT, _N, _INT, _P, _N, _N, _INT, _P)),
    "average_words": (None, (_P, _N, _N, _INT, _INT, _U, _U, _INT, _P)),
    "draw_distinct": (None, (_N, _N, _N, _U, _U, _P)),
    "add_at": (_N, (_P, _N, _P, _P, _P, _N, _INT)),
    "sum_over_union": (_N, (_P, _N, _P, _P, _P, _N, _INT, _INT, _P, _P)),
    "orthonormal": (None, (_P, _P, _P, _N, _N)),
    "join": (None, (_P, _P, _N, _P, _P, _N, _INT)),
}


@cache
def level() -> str | None:
    """The name of the shared object that fits this machine and was built, or None."""
    return next(iter(levels()), None)


@cache
def levels() -> tuple[str, ...]:
    """All that were built and run here, widest first."""
    return tuple(name for name in _levels_here() if path_of(name).exists())


def library() -> ctypes.CDLL:
    """The library of this machine's level."""
    name = level()
    if name is None:
        raise KernelError(HOW_TO_GET_THEM)
    return load(name)


@cache
def load(name: str) -> ctypes.CDLL:
    """The library of one level, with the types of its functions; calling one releases the GIL."""
    loaded = ctypes.CDLL(str(path_of(name)))
    interface = getattr(loaded, "laconic_interface", None)
    if interface is None or interface() != INTERFACE:
        raise KernelError(f"{path_of(name).name} was built from other sources than this code; reinstall laconic")
    for kernel, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, f"laconic_{kernel}")
        function.restype = result
        function.argtypes = arguments
    return loaded


HOW_TO_GET_THEM = "the native CPU kernels were not built; install a C++17 compiler, then reinstall laconic"


def path_of(name: str) -> Path:
    return Path(__file__).parent / f"kernels_{name}.so"


def _levels_here() -> list[str]:
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return ["neon" if machine in ("aarch64", "arm64") else "portable"]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ["v2"]
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return [name for name, needed in _LEVELS if needed <= flags]


def pointer(name: str, x: Tensor, dtype: torch.dtype, length: int | None = None, *, dims: int = 1) -> int:
    """The address of `length` entries of this type, side by side on the CPU; of any number if none is given."""
    check_vector(x, dtype, x.numel() if length is None else length, name, dims=dims)
    if x.device.type != "cpu":
        raise KernelError(f"{name} is on {x.device}; give a tensor on the CPU")
    return x.data_ptr()


def check_apart(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two vectors that share memory."""
    start = x.data_ptr()
    other_start = other.data_ptr()
    if start < other_start + other.nbytes and other_start < start + x.nbytes:
        raise KernelError(f"{name} and {other_name} overlap; give tensors of their own")


def check_reach(positions: Tensor, n: int) -> None:
    """Refuse ascending positions of which the first or the last is not under n."""
    if not positions.numel():
        return
    first, last = positions.numpy()[[0, -1]].tolist()
    if not 0 <= first <= last < n:
        raise KernelError(f"positions reach from {first} to {last}; give ascending under {n}")


def num_threads() -> int:
    """As many threads as torch uses, unless the calling thread was given a number of its own."""
    given: int = getattr(_here, "num_threads", 0)
    return given or torch.get_num_threads()


def give_threads(number: int) -> None:
    """Let native kernels start so many in the calling thread, whatever torch uses there: theirs end with a call."""
    _here.num_threads = number


_here = threading.local()
