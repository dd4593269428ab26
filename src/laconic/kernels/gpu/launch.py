"""All kernels here share this: quick launches, programs of one launch that wait for each other, |x| as integers."""

# mypy: allow-untyped-defs, allow-untyped-calls
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import functools
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_compiled: dict[tuple[object, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **options: int) -> None:
    """kernel[grid](*arguments, **options) in a third of the time; options are always the same for a kernel.

    Triton compares every constant of a module with what was compiled in, which takes 40 to 80 us.
    """
    device = next(each.device for each in arguments if isinstance(each, Tensor))
    if device.type != "cuda":  # interpreted
        kernel[grid](*arguments)
        return
    num_variables = _num_variables(kernel)
    key = (kernel, device, *map(_kind, arguments[:num_variables]), *arguments[num_variables:])
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **options)
    else:
        compiled[(*grid, 1)](*arguments)


@cache
def _num_variables(kernel: Any) -> int:
    """The number of arguments before the constants."""
    return sum(not param.is_constexpr for param in kernel.params)


def _kind(argument: Any) -> object:
    """What compiled code may depend on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    return -(2**31) <= argument < 2**31, argument % 16 == 0, argument == 1


WARPS = 8
REGISTERS = 128
PROGRAMS_PER_SM = 2  # all must be resident at once: 2 * 8 warps * 32 threads * 128 registers are all that an SM has
_FEW_ENTRIES = 4_000_000  # under that, one a multiprocessor: fewer meet sooner

# The head of the shared memory is zero between launches: counters in cache lines of their own, tallies of digits, bins.
ARRIVED = tl.constexpr(0)
LEFT = tl.constexpr(64)
NUM_OPEN = tl.constexpr(128)
DIGITS = tl.constexpr(256)
BINS = tl.constexpr(2048)
HEAD = tl.constexpr(BINS.value + 16384)

_memories: dict[tuple[int, int], list[Tensor]] = {}


@triton.jit
def meet(memory, awaited):
    """Wait until `awaited` more programs in all have come here; what each wrote before, all then see.

    The barriers around the counter make the one thread that counts speak for the whole program.
    """
    awaited += tl.num_programs(0)
    tl.debug_barrier()
    arrived = tl.atomic_add(memory + ARRIVED, 1, sem="acq_rel") + 1
    while arrived < awaited:
        arrived = tl.atomic_add(memory + ARRIVED, 0, sem="acquire")
    tl.debug_barrier()
    return awaited


@triton.jit
def leave(memory):
    """Clear the head for the next launch: each program its share of the bins, and the last one to leave all the rest.

    All have read the bins by now: they met after it.
    """
    share = tl.cdiv(HEAD - BINS, tl.num_programs(0))
    for start in range(0, share, 256):
        at = start + tl.arange(0, 256)
        own = tl.program_id(0) * share + at
        tl.store(memory + BINS + own, tl.zeros([256], tl.int32), mask=(at < share) & (own < HEAD - BINS))
    tl.debug_barrier()
    if tl.atomic_add(memory + LEFT, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(memory + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))


def num_resident(device: torch.device, n: int) -> int:
    """The number of programs that run at once; the interpreter runs them in turn, so none must wait for the next."""
    if device.type != "cuda":
        return 1
    return _num_processors(device) * (PROGRAMS_PER_SM if n > _FEW_ENTRIES else 1)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def memory_of(device: torch.device, num_words: int) -> Tensor:
    """At least that many int32 words, the head zero, that only launches on the current stream of `device` share.

    What is outgrown is kept, as a launch may still use it; doubling keeps the sum under twice the largest.
    """
    on_cuda = device.type == "cuda"
    if on_cuda and torch.cuda.is_current_stream_capturing():
        # The graph alone has it, wherever that is replayed; a captured clearing of the head runs with it.
        return torch.zeros(num_words, dtype=torch.int32, device=device)
    index = device.index or 0
    key = (index, triton.runtime.driver.active.get_current_stream(index)) if on_cuda else (-1, 0)
    kept = _memories.setdefault(key, [])
    last = kept[-1] if kept else torch.empty(0)  # looked at once: another thread may add one meanwhile
    if last.numel() < num_words:
        last = torch.zeros(max(num_words, 2 * last.numel()), dtype=torch.int32, device=device)
        kept.append(last)
    return last


@triton.jit
def magnitude_bits(x):
    """|x| as int32 bit patterns, which order like |x|; every NaN has the one above Inf.

    A compiler may take the absolute value instead, and an NVIDIA GPU gives that, as any sum, another NaN than it read.
    """
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)
