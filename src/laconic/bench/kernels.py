"""Every kernel against its reference in plain torch, and against a copy of as many entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from laconic import kernels
from laconic.bench.clock import median_seconds

_NUM_FRAMES = 8
_LANE_WIDTH = 6
_LOW_WIDTH = 7  # what Elias-Fano takes at 1 %


@dataclass(frozen=True)
class KernelBench:
    """One kernel; the times are medians of rounds in which all took turns."""

    kernel: str
    backend: str
    ms: float
    speedup: float  # times faster than the reference
    over_copy: float  # times as long as copying n float32 entries


def bench_kernels(n: int, rho: float, device: str = "cpu", rounds: int = 5, seed: int = 0) -> list[KernelBench]:
    """Time each kernel of the device's backend on n entries, of which round(rho*n) are selected."""
    backend = kernels.backend(device)
    own = _works(kernels.module(backend), n, rho, device, seed)
    plain = _works(kernels.reference, n, rho, device, seed)
    source, target = torch.randn(n, device=device), torch.empty(n, device=device)
    found = []
    for name in own:
        works: dict[str, Callable[[], object]] = {
            "own": own[name],
            "plain": plain[name],
            "copy": lambda: target.copy_(source),
        }
        for work in works.values():
            work()  # what is made once is made before
        seconds = median_seconds(works, device, rounds)
        ratios = seconds["plain"] / seconds["own"], seconds["own"] / seconds["copy"]
        found.append(KernelBench(name, backend, 1e3 * seconds["own"], *ratios))
    return found


def _works(of: ModuleType, n: int, rho: float, device: str, seed: int) -> dict[str, Callable[[], object]]:
    """One call of each kernel of a backend, on the same data for all backends."""
    generator = torch.Generator().manual_seed(seed)
    k = max(1, round(rho * n))
    x = torch.randn(n, generator=generator).to(device)
    balance, search = torch.zeros(n, device=device), kernels.new_search(n, k, device)
    frames = [
        torch.randperm(n, generator=generator)[:k].sort().values.to(device, torch.int32) for _ in range(_NUM_FRAMES)
    ]
    values = [torch.randn(k, generator=generator).to(device) for _ in frames]
    thresholds = torch.tensor([0.5, 1.0, 2.0, 3.0], device=device)
    lanes = torch.randint(2**_LANE_WIDTH, (n,), generator=generator).to(device, torch.int32)
    packed = kernels.reference.pack_lanes(lanes, _LANE_WIDTH)
    ballots = [kernels.reference.pack_signs(torch.roll(x, f)) for f in range(_NUM_FRAMES)]
    bitmap = kernels.reference.set_bits(frames[0], n)
    num_high_bits = k + ((n - 1) >> _LOW_WIDTH)
    code = kernels.reference.encode_elias_fano(frames[0], _LOW_WIDTH, num_high_bits)
    return {
        "withdraw_": lambda: of.withdraw_(balance, x, k, search),
        "all_finite": lambda: of.all_finite(x),
        "mean_magnitude": lambda: of.mean_magnitude(x),
        "count_at_least": lambda: of.count_at_least(x, thresholds),
        "compact": lambda: of.compact(x, 2.5),
        "set_bits": lambda: of.set_bits(frames[0], n),
        "unpack_bits": lambda: of.unpack_bits(bitmap),
        "pack_lanes": lambda: of.pack_lanes(lanes, _LANE_WIDTH),
        "unpack_lanes": lambda: of.unpack_lanes(packed, n, _LANE_WIDTH),
        "encode_elias_fano": lambda: of.encode_elias_fano(frames[0], _LOW_WIDTH, num_high_bits),
        "decode_elias_fano": lambda: of.decode_elias_fano(code, n, k, _LOW_WIDTH),
        "check_sum": lambda: of.check_sum(packed),
        "add_at_": lambda: of.add_at_(balance, frames, values),
        "pack_signs": lambda: of.pack_signs(x),
        "unpack_signs": lambda: of.unpack_signs(ballots[0], n, 0.5),
        "vote": lambda: of.vote(ballots),
    }
