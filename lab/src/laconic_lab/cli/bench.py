"""laconic bench: single parts, measured."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from laconic.cli import number, table
from laconic_lab.bench import DISTRIBUTIONS, bench_select, bench_step
from laconic_lab.errors import TaskError
from laconic_lab.train.worker import check_device


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic bench`."""
    parser = commands.add_parser("bench", help="measure single parts")
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)

    select = parts.add_parser("select", help="selection against torch.topk, sampled selection and a copy")
    _add_size(select)
    select.add_argument("--rho", type=float, default=0.01, metavar="X", help="share that is sent (default 0.01)")
    select.add_argument("--dist", default="laplace", choices=(*DISTRIBUTIONS, "all"), help="default laplace")
    select.add_argument("--threads", type=int, metavar="T", help="of the CPU (default as torch chooses)")
    select.add_argument("--rounds", type=int, default=5, metavar="R", help="of all, interleaved (default 5)")
    select.set_defaults(run=run_select)

    step = parts.add_parser("step", help="the stages of an exchange on one process, without a network")
    _add_size(step)
    step.add_argument("--scheme", default="topk:rho=0.01", metavar="TEXT", help="default topk:rho=0.01")
    step.add_argument("--workers", type=int, default=4, metavar="M", help="who all say the same (default 4)")
    step.add_argument("--steps", type=int, default=20, metavar="N", help="of which medians are taken (default 20)")
    step.set_defaults(run=run_step)


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, default=25_000_000, metavar="N", help="entries (default 25,000,000)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")


def _check(args: argparse.Namespace) -> None:
    if args.n < 1 or args.n >= 2**31:
        raise TaskError(f"--n is {args.n}; give 1 to {2**31 - 1}")
    if not 0 < getattr(args, "rho", 1) <= 1:
        raise TaskError(f"--rho is {args.rho}; give a share in (0, 1]")
    check_device(args.device)
    for name in ("rounds", "workers", "steps"):
        if getattr(args, name, 1) < 1:
            raise TaskError(f"--{name} is {getattr(args, name)}; give 1 or more")
    threads = getattr(args, "threads", None)
    if threads is not None:
        if threads < 1:
            raise TaskError(f"--threads is {threads}; give 1 or more")
        torch.set_num_threads(threads)


def _show(results: Sequence[Any], text: str, as_json: bool) -> None:
    """Print results: an object a line, or in words."""
    print("\n".join(json.dumps(asdict(result)) for result in results) if as_json else text)


def run_select(args: argparse.Namespace) -> int:
    """Measure selection."""
    _check(args)
    dists = list(DISTRIBUTIONS) if args.dist == "all" else [args.dist]
    results = [bench_select(args.n, args.rho, dist, args.device, args.rounds) for dist in dists]
    first = results[0]
    cores = f"{first.threads} threads of {platform.machine()}"
    machine = cores if args.device == "cpu" else torch.cuda.get_device_name()
    head = (
        "gradients",
        "ms",
        "x torch.topk",
        "x sampled",
        "of a copy",
        "of 12 bytes",
        "passes",
        "bisection x torch.topk",
        "x sampled",
        "its passes",
        "result",
    )
    rows = [
        (
            each.dist, f"{each.ms['withdraw']:.3f}", f"{each.speedup_topk:.1f}", f"{each.speedup_sampled:.1f}",
            f"{each.over_copy:.2f}", f"{each.over_floor:.2f}", f"{each.passes:.2f}",
            f"{each.bisection_over_topk:.2f}", f"{each.bisection_over_sampled:.2f}", f"{each.bisection_passes:.2f}",
            "exact" if each.exact else "WRONG",
        )
        for each in results
    ]  # fmt: skip
    title = f"{first.k:,} of {first.n:,}, {first.kernels} kernels, {machine}"
    _show(results, f"{title}\n{table(head, rows)}", args.json)
    return 0 if all(each.exact for each in results) else 1


def run_step(args: argparse.Namespace) -> int:
    """Measure the stages of a step."""
    _check(args)
    step = bench_step(args.n, args.workers, args.scheme, args.device, args.steps)
    title = f"{step.scheme}, {step.n:,} entries in {step.num_buckets} buckets, {step.kernels} kernels"
    head = ("choose ms", "encode ms", "apply ms", "total ms", "bytes out", "peak bytes an entry", "passes")
    times = (f"{ms:.2f}" for ms in (step.choose_ms, step.encode_ms, step.apply_ms, step.total_ms))
    peak = None if step.peak_bytes is None else step.peak_bytes / step.n
    row = (*times, f"{step.wire_bytes:,}", number(peak, ".2f"), number(step.passes, ".2f"))
    _show([step], f"{title}\n{table(head, [row])}", args.json)
    return 0
