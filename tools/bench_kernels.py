"""Time every kernel of a device's backend against its reference, and against a copy of as many entries.

    python tools/bench_kernels.py --n 10000000 --rho 0.01 [--device cuda]

One JSON object a kernel is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType

import torch
from torch import Tensor

from laconic import kernels
from laconic_lab.bench.common import median_seconds

_NUM_FRAMES = 8
_MODULO_BITS = 4
_LANE_WIDTH = 6
_LOW_WIDTH = 7  # what Elias-Fano takes at 1 %
_LEVELS, _CODE_WIDTH = 7, 6  # maxnorm:bits=4 among 4 workers: five codes to an int32


@dataclass(frozen=True)
class KernelBench:
    """One kernel; the times are medians of rounds in which all took turns."""

    kernel: str
    backend: str
    ms: float
    speedup: float  # times faster than the reference
    over_copy: float  # times as long as copying n float32 entries
    over_floor: float  # times as long as its bytes, read and written once, take at the copy's bandwidth


def bench_kernels(n: int, rho: float, device: str = "cpu", rounds: int = 5, seed: int = 0) -> list[KernelBench]:
    """Time each kernel of the device's backend on n entries, of which round(rho*n) are selected."""
    backend = kernels.backend(device)
    own = _works(kernels.module(backend), n, rho, device, seed)
    plain = _works(kernels.reference, n, rho, device, seed)
    source = torch.randn(n, device=device)
    target = torch.empty(n, device=device)
    results = []
    for name, (work, num_bytes) in own.items():
        works: dict[str, Callable[[], object]] = {
            "own": work,
            "plain": plain[name][0],
            "copy": lambda: target.copy_(source),
        }
        for each in works.values():
            each()  # what is made once is made before
        seconds = median_seconds(works, device, rounds)
        over_copy = seconds["own"] / seconds["copy"]
        over_floor = over_copy * 8 * n / num_bytes
        results.append(
            KernelBench(name, backend, 1e3 * seconds["own"], seconds["plain"] / seconds["own"], over_copy, over_floor)
        )
    return results


_Works = dict[str, tuple[Callable[[], object], float]]  # a call, and the bytes that it must move


def _works(of: ModuleType, n: int, rho: float, device: str, seed: int) -> _Works:
    """One call of each kernel of a backend, on the same data for all backends."""
    generator = torch.Generator().manual_seed(seed)
    k = max(1, round(rho * n))
    x = torch.randn(n, generator=generator).to(device)
    total = torch.zeros(n, device=device)
    frames = [
        torch.randperm(n, generator=generator)[:k].sort().values.to(device, torch.int32) for _ in range(_NUM_FRAMES)
    ]
    values = [torch.randn(k, generator=generator).to(device) for _ in frames]
    lanes = torch.randint(2**_LANE_WIDTH, (n,), generator=generator).to(device, torch.int32)
    return {
        **_selecting(of, x, k),
        **_coding(of, frames[0], lanes, n),
        "add_at_": (lambda: of.add_at_(total, frames, values), _NUM_FRAMES * 16 * k),
        **_signing(of, x),
        **_modulo_codes(of, x),
        **_rounding(of, x),
    }


def _selecting(of: ModuleType, x: Tensor, k: int) -> _Works:
    n = x.numel()
    balance = torch.zeros_like(x)
    search = kernels.new_search(x.numel(), k, x.device)
    thresholds = torch.tensor([0.5, 1.0, 2.0, 3.0], device=x.device)
    return {
        "withdraw_": (lambda: of.withdraw_(balance, x, k, search), 12 * n + 8 * k),
        "all_finite": (lambda: of.all_finite(x), 4 * n),
        "mean_magnitude": (lambda: of.mean_magnitude(x), 4 * n),
        "count_at_least": (lambda: of.count_at_least(x, thresholds), 4 * n),
    }


def _coding(of: ModuleType, positions: Tensor, lanes: Tensor, n: int) -> _Works:
    k = positions.numel()
    packed = kernels.reference.pack_lanes(lanes, _LANE_WIDTH)
    bitmap = kernels.reference.set_bits(positions, n)
    num_high_bits = k + ((n - 1) >> _LOW_WIDTH)
    code = kernels.reference.encode_elias_fano(positions, _LOW_WIDTH, num_high_bits)
    rice = kernels.reference.encode_rice(positions)
    return {
        "set_bits": (lambda: of.set_bits(positions, n), bitmap.nbytes + 4 * k),
        "unpack_bits": (lambda: of.unpack_bits(bitmap), bitmap.nbytes + 4 * k),
        "pack_lanes": (lambda: of.pack_lanes(lanes, _LANE_WIDTH), 4 * n + packed.nbytes),
        "unpack_lanes": (lambda: of.unpack_lanes(packed, n, _LANE_WIDTH), 4 * n + packed.nbytes),
        "encode_elias_fano": (
            lambda: of.encode_elias_fano(positions, _LOW_WIDTH, num_high_bits), 4 * k + code.nbytes,
        ),
        "decode_elias_fano": (lambda: of.decode_elias_fano(code, n, k, _LOW_WIDTH), 4 * k + code.nbytes),
        "encode_rice": (lambda: of.encode_rice(positions), 4 * k + rice.nbytes),
        "decode_rice": (lambda: of.decode_rice(rice, n, k), 4 * k + rice.nbytes),
        "check_sum": (lambda: of.check_sum(packed), packed.nbytes),
    }  # fmt: skip


def _signing(of: ModuleType, x: Tensor) -> _Works:
    n = x.numel()
    ballots = [kernels.reference.pack_signs(torch.roll(x, f)) for f in range(_NUM_FRAMES)]
    return {
        "pack_signs": (lambda: of.pack_signs(x), 4 * n + n / 8),
        "unpack_signs": (lambda: of.unpack_signs(ballots[0], n, 0.5), 4 * n + n / 8),
        "vote": (lambda: of.vote(ballots), (_NUM_FRAMES + 2) * n / 8),
    }


def _modulo_codes(of: ModuleType, x: Tensor) -> _Works:
    n = x.numel()
    rolled = torch.roll(x, 1)
    steps = torch.full_like(kernels.reference.largest_changes(x, rolled)[0], 0.1)  # one of each block
    request = kernels.reference.encode_modulo(x, steps, 0.5, _MODULO_BITS)
    _, differences, _ = kernels.reference.compare_modulo(x, *request, steps, 0.5, _MODULO_BITS)
    request_bytes = n * _MODULO_BITS / 8
    reply_bytes = n * (_MODULO_BITS - 1) / 8
    return {
        "largest_changes": (lambda: of.largest_changes(x, rolled), 8 * n),
        "encode_modulo": (lambda: of.encode_modulo(x, steps, 0.5, _MODULO_BITS), 4 * n + request_bytes),
        "compare_modulo": (
            lambda: of.compare_modulo(x, *request, steps, 0.5, _MODULO_BITS),
            8 * n + request_bytes + reply_bytes,
        ),
        "decode_differences": (
            lambda: of.decode_differences(differences, steps, n, _MODULO_BITS - 1),
            reply_bytes + 4 * n,
        ),
    }


def _rounding(of: ModuleType, x: Tensor) -> _Works:
    n = x.numel()
    scale = torch.tensor([_LEVELS / 6.0], device=x.device)
    key = (1, 2)
    how = scale, n, _LEVELS, _CODE_WIDTH, -(-n // 20) * 4, torch.int32, key
    words = kernels.reference.quantize_pack(x, *how)
    rows = words.view(4, -1)
    return {
        "largest_magnitudes": (lambda: of.largest_magnitudes(x, n), 4 * n),
        "quantize_pack": (lambda: of.quantize_pack(x, *how), 4 * n + words.nbytes),
        "unpack_scale": (lambda: of.unpack_scale(words, n, _CODE_WIDTH, scale, n), 4 * n + words.nbytes),
        "average_words": (lambda: of.average_words(rows, _CODE_WIDTH, key), words.nbytes * 5 / 4),
    }


def main() -> None:
    """Time them, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10_000_000, help="entries")
    parser.add_argument("--rho", type=float, default=0.01, help="share that is selected")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5, help="of all, interleaved")
    options = parser.parse_args()
    for row in bench_kernels(options.n, options.rho, options.device, options.rounds):
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
