"""Native kernels for CPU tensors: C++ behind ctypes, with the names and results of the reference."""

from laconic.kernels import reference
from laconic.kernels.contract import kernels_in

TAKEN_FROM_REFERENCE = {
    "flag_nonfinite_": "a CPU need not be asked later",
    "zero_if_": "a CPU need not be asked later",
    "read_elias_fano": "a CPU need not be asked later",
    "thin_products_": "torch's own products are as good on a CPU",
    "settle_products_": "torch's own products are as good on a CPU",
    "stack_momentum_": "products take nearly all of an optimizer's step on a CPU",
    "symmetric_product_": "torch's own products are as good on a CPU",
    "add_decayed_": "products take nearly all of an optimizer's step on a CPU",
}

globals().update(kernels_in(__name__, TAKEN_FROM_REFERENCE))
