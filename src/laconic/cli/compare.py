"""laconic compare: the same job under several schemes, and a table."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from laconic.cli.job_options import add_job_options, job_of
from laconic.cli.table import table
from laconic.cli.train import check_before_launch
from laconic.compare import Comparison, compare, folder_of
from laconic.errors import TaskError
from laconic.recipes import parse
from laconic.train import launch

_DEFAULT = ("dense", "bf16", "topk:rho=0.01")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic compare`."""
    parser = commands.add_parser(
        "compare",
        help="train the same job under several schemes and print a table",
        description="Run the same job, with the same seeds, under each scheme. "
        "Speed-up is by training time to the target accuracy.",
    )
    parser.add_argument(
        "--scheme", action="append", metavar="NAME", help=f"a scheme; repeat it (default {', '.join(_DEFAULT)})"
    )
    parser.add_argument(
        "--target", type=float, metavar="X", help="accuracy to time (default: dense's final accuracy less one point)"
    )
    add_job_options(parser, without=("scheme", "resume", "tensorboard", "quiet"))
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Train under each scheme in turn, then print the table."""
    schemes = [str(parse(text)) for text in asked.scheme or _DEFAULT]
    if len(set(schemes)) < len(schemes):
        raise TaskError("a scheme is given twice; give each once")
    if asked.target is not None and not 0 < asked.target <= 1:
        raise TaskError(f"--target is {asked.target}; give an accuracy between 0 and 1")
    with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
        out = asked.out or Path(scratch)
        jobs = [job_of(asked, scheme=scheme, out=folder_of(out, scheme), json=False, quiet=True) for scheme in schemes]
        check_before_launch(jobs[0])
        for number, job in enumerate(jobs, 1):
            print(f"laconic: {job.scheme} ({number} of {len(jobs)})", file=sys.stderr, flush=True)
            launch(job)
        comparison = compare(out, schemes, asked.target)
    print(json.dumps(comparison.as_dict()) if asked.json else _text(comparison), flush=True)
    return 0


def _text(comparison: Comparison) -> str:
    target = f"s to {100 * comparison.target:.1f} %"
    head = ["scheme", "accuracy", target, "step ms", "bytes out/step", "in/step", "ratio", "vs dense", "vs bf16"]
    rows = [
        [
            row.scheme,
            f"{100 * row.accuracy:.2f} %",
            _number(row.seconds_to_target, ".1f"),
            f"{row.step_ms:.1f}",
            f"{row.bytes_out:,}",
            f"{row.bytes_in:,}",
            _number(row.ratio, ".1f", "x"),
            _number(row.speedup, ".2f", "x"),
            _number(row.speedup_bf16, ".2f", "x"),
        ]
        for row in comparison.rows
    ]
    return table(head, rows)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
