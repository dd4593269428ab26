"""Native kernels for CPU tensors: C++ behind ctypes, with the names and results of the reference."""

from laconic.kernels.registry import kernels_in

globals().update(kernels_in(__name__))
