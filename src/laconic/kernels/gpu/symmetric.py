"""Products of matrices that come out symmetric: tiles on and below the diagonal are computed, and mirrored.

What is multiplied and added around them is in the same launch. Of an optimizer's step (85 M entries of a GPT in 48
matrices, an H200) they take 1.3 ms, where a library's batched products and the passes after those took 1.7.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import KernelError
from laconic.kernels.gpu.launch import launch
from laconic.kernels.reference.symmetric import symmetric_product_ as symmetric_product_by_torch_

_TILE, _DEEP = 128, 64
_BYTES_OF_STAGE = 2 * 2 * _TILE * _DEEP  # of shared memory, for both factors in 16 bits


@triton.jit
def _row_of(t):
    """The i with i (i+1) / 2 <= t < (i+1) (i+2) / 2, of which a root may miss by one."""
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return tl.where(i * (i + 1) // 2 > t, i - 1, i)


@triton.jit
def _symmetric(
    left,
    right,
    addend,
    out,
    factors,
    alpha,
    beta,
    diagonal,
    rows,
    inner,
    left_matrix,
    left_row,
    left_column,
    right_matrix,
    right_row,
    right_column,
    HAS_ADDEND: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    DEEP: tl.constexpr,
):
    """A tile; masks, which forbid vector stores, are only there where matrices end within one."""
    matrix = tl.program_id(1).to(tl.int64)
    i = _row_of(tl.program_id(0))
    j = tl.program_id(0) - i * (i + 1) // 2
    m = i * TILE + tl.arange(0, TILE)
    n = j * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEEP)
    left_at = left + matrix * left_matrix + m[:, None] * left_row + k[None, :] * left_column
    right_at = right + matrix * right_matrix + n[None, :] * right_row + k[:, None] * right_column
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, inner, DEEP):
        if EVEN:
            a = tl.load(left_at)
            b = tl.load(right_at)
        else:
            a = tl.load(left_at, mask=(m[:, None] < rows) & (k[None, :] < inner - start), other=0.0)
            b = tl.load(right_at, mask=(n[None, :] < rows) & (k[:, None] < inner - start), other=0.0)
        total = tl.dot(a, b, total)
        left_at += DEEP * left_column
        right_at += DEEP * right_column
    total *= alpha * tl.load(factors + matrix)
    inside = (m[:, None] < rows) & (n[None, :] < rows)
    at = matrix * rows * rows + m[:, None] * rows + n[None, :]
    if HAS_ADDEND:
        if EVEN:
            added = tl.load(addend + at)
        else:
            added = tl.load(addend + at, mask=inside, other=0.0)
        total += beta * added.to(tl.float32)
    total += tl.where(m[:, None] == n[None, :], diagonal, 0.0)
    result = total.to(out.dtype.element_ty)
    if EVEN:
        tl.store(out + at, result)
    else:
        tl.store(out + at, result, mask=inside)
    if i != j:
        mirrored = out + matrix * rows * rows + n[:, None] * rows + m[None, :]
        if EVEN:
            tl.store(mirrored, tl.trans(result))
        else:
            tl.store(mirrored, tl.trans(result), mask=(n[:, None] < rows) & (m[None, :] < rows))


def symmetric_product_(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    factors: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    addend: Tensor | None = None,
    diagonal: float = 0.0,
) -> None:
    rows, inner = left.shape[1:]
    stacks = [out, left, right, *([] if addend is None else [addend])]
    if any(stack.dtype != torch.bfloat16 for stack in stacks) or not left.numel():  # tensor cores want 16 bits
        options = {"alpha": alpha, "beta": beta, "diagonal": diagonal}
        symmetric_product_by_torch_(out, left, right, factors, addend=addend, **options)
        return
    if not out.is_contiguous() or (addend is not None and not addend.is_contiguous()):
        raise KernelError("the product or what is added to it is strided; give contiguous stacks of matrices")
    num_rows = triton.cdiv(rows, _TILE)
    grid = num_rows * (num_rows + 1) // 2, len(out)
    factors = _ones(len(out), out.device) if factors is None else factors.contiguous()
    variables = left, right, out if addend is None else addend, out, factors, alpha, beta, diagonal, rows, inner
    even = rows % _TILE == 0 and inner % _DEEP == 0
    tile = addend is not None, even, _TILE, _DEEP
    stages = _num_stages(out.device)
    launch(_symmetric, grid, *variables, *left.stride(), *right.stride(), *tile, num_warps=4, num_stages=stages)


@functools.cache
def _num_stages(device: torch.device) -> int:
    """Three where two programs then share a multiprocessor, as on an H200; a small GPU has room for two stages."""
    if device.type != "cuda":  # interpreted
        return 1
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return 3 if room > 4 * _BYTES_OF_STAGE else 2


@functools.lru_cache(maxsize=64)
def _ones(number: int, device: torch.device) -> Tensor:
    return torch.ones(number, device=device)
