"""laconic bench: single parts, measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch

from laconic.bench import bench_wire
from laconic.errors import TaskError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic bench`."""
    parser = commands.add_parser("bench", help="measure single parts")
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    wire = parts.add_parser("wire", help="bits per index against the floor, and throughput of the code")
    wire.add_argument("--n", type=int, default=10_000_000, metavar="N", help="entries (default 10,000,000)")
    wire.add_argument("--rho", type=float, default=0.01, metavar="X", help="share that is sent (default 0.01)")
    wire.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
    wire.add_argument("--json", action="store_true", help="one JSON object on stdout")
    wire.set_defaults(run=run_wire)


def run_wire(asked: argparse.Namespace) -> int:
    """Measure the index code."""
    if asked.n < 1 or asked.n >= 2**31:
        raise TaskError(f"--n is {asked.n}; give 1 to {2**31 - 1}")
    if not 0 < asked.rho <= 1:
        raise TaskError(f"--rho is {asked.rho}; give a share in (0, 1]")
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise TaskError("--device is cuda, but torch sees no CUDA device here; use --device cpu")
    found = bench_wire(asked.n, asked.rho, asked.device)
    if asked.json:
        print(json.dumps(asdict(found)))
    else:
        over = found.bits_per_index / found.floor_bits - 1 if found.floor_bits else 0.0
        print(
            f"{found.codec}, {found.k:,} of {found.n:,}: {found.bits_per_index:.3f} bits an index "
            f"({100 * over:.1f} % over the floor of {found.floor_bits:.3f}); "
            f"encode {found.encode_gb_per_s:.2f} GB/s, decode {found.decode_gb_per_s:.2f} GB/s of 4-byte positions; "
            f"round trip {'exact' if found.exact else 'WRONG'}"
        )
    return 0 if found.exact else 1
