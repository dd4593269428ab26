"""|x| as integers, by which all selection compares."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """|x| as int32 bit patterns, which order like |x|; every NaN has the one above Inf.

    A compiler may take the absolute value instead, and an NVIDIA GPU gives that, as any sum, another NaN than it read.
    """
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)
