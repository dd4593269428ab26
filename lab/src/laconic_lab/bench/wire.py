"""The index codes against their floor, and how fast they are."""

from __future__ import annotations

from dataclasses import dataclass

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
