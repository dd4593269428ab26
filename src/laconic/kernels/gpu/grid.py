"""Programs of one launch that wait for each other, and the memory they share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8
REGISTERS = 128
PROGRAMS_PER_SM = 2  # all must be resident at once: 2 * 8 warps * 32 threads * 128 registers are all that an SM has
_FEW_ENTRIES = 4_000_000  # under that, one a multiprocessor: fewer meet sooner (40 us instead of 45 for 1 M)

# The head of the shared memory is zero between launches: two counters in cache lines of their own, then rows of bins.
ARRIVED = tl.constexpr(0)
LEFT = tl.constexpr(64)
BINS = tl.constexpr(256)
NUM_BINS = tl.constexpr(256)  # of a digit of 8 bits; with histograms of 2,048 bins a withdrawal takes twice as long
HEAD = tl.constexpr(2048)

_memories: dict[tuple[int, int], list[Tensor]] = {}


@triton.jit
def meet(memory, awaited):
    """Wait until `awaited` more programs in all have come here; what each wrote before, all then see.

    The barriers around the counter make the one thread that counts speak for the whole program.
    """
    awaited += tl.num_programs(0)
    tl.debug_barrier()
    tl.atomic_add(memory + ARRIVED, 1, sem="acq_rel")
    while tl.load(memory + ARRIVED, volatile=True) < awaited:
        pass
    tl.atomic_add(memory + ARRIVED, 0, sem="acq_rel")
    tl.debug_barrier()
    return awaited


@triton.jit
def leave(memory):
    """Say that this program reads the head no more; the last one to say so clears it for the next launch."""
    tl.debug_barrier()
    if tl.atomic_add(memory + LEFT, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(memory + tl.arange(0, HEAD), tl.zeros([HEAD], tl.int32))


def num_resident(device: torch.device, n: int) -> int:
    """How many programs run at once; the interpreter runs one after the other, so one must not wait for the next."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * (PROGRAMS_PER_SM if n > _FEW_ENTRIES else 1)


def memory_of(device: torch.device, num_words: int) -> Tensor:
    """At least that many int32 words, the head zero, that only launches on the current stream of `device` share.

    What is outgrown is kept, as a captured graph may still use it; doubling keeps the sum under twice the largest.
    """
    on_cuda = device.type == "cuda"
    key = (device.index or 0, torch.cuda.current_stream(device).cuda_stream) if on_cuda else (-1, 0)
    kept = _memories.setdefault(key, [])
    if not kept or kept[-1].numel() < num_words:
        num_words = max(num_words, 2 * kept[-1].numel() if kept else 0)
        fresh = torch.zeros(num_words, dtype=torch.int32, device=device)
        if on_cuda and torch.cuda.is_current_stream_capturing():
            return fresh  # the graph alone has it: a captured clearing of the head runs only when that graph does
        kept.append(fresh)
    return kept[-1]
