"""Bits per index against the floor, log2(C(n, k))/k, and throughput of the index code, as one JSON object.

python tools/bench_wire.py --n 10000000 --rho 0.01 [--device cuda]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

import torch

from laconic.wire import floor_bits, smallest_index_codec
from laconic_lab.bench.common import median_seconds


@dataclass(frozen=True)
class WireBench:
    """One size of sparse frame; throughput counts the positions as 4-byte integers."""

    n: int
    k: int
    codec: str
    bits_per_index: float
    floor_bits: float  # log2(C(n, k)) / k
    encode_gb_per_s: float
    decode_gb_per_s: float
    exact: bool  # the round trip gave the same positions


def bench_wire(n: int, rho: float, device: str = "cpu", seed: int = 0) -> WireBench:
    """Code k = round(rho*n) random positions out of n and read them back."""
    k = min(n, max(1, round(rho * n)))
    codec = smallest_index_codec(n, k)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(n, generator=generator)[:k].sort().values.to(device, torch.int32)
    words = codec.encode(positions, n)
    works = {"encode": lambda: codec.encode(positions, n), "decode": lambda: codec.decode(words, n, k)}
    seconds = median_seconds(works, device)
    return WireBench(
        n=n,
        k=k,
        codec=codec.__name__,
        bits_per_index=32 * words.numel() / k,
        floor_bits=floor_bits(n, k) / k,
        encode_gb_per_s=4 * k / seconds["encode"] / 1e9,
        decode_gb_per_s=4 * k / seconds["decode"] / 1e9,
        exact=torch.equal(codec.decode(words, n, k), positions),
    )


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10_000_000, help="entries")
    parser.add_argument("--rho", type=float, default=0.01, help="share that is sent")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    print(json.dumps(asdict(bench_wire(options.n, options.rho, options.device))))


if __name__ == "__main__":
    main()
