"""laconic train: one task under one scheme."""

from __future__ import annotations

import argparse
import json
import os
import sys

from laconic.cli.job_options import add_job_options, job_of
from laconic.cli.launching import add_lab_options, lab_spec, launcher
from laconic.errors import LaconicError
from laconic.tasks import TASKS
from laconic.train import Job, is_worker, work
from laconic.train.checkpoint import find_checkpoint
from laconic.train.result import Result


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic train`."""
    parser = commands.add_parser(
        "train",
        help="train a task under a scheme, on this machine or under torchrun",
        description="Train a task under a scheme. Starts its own workers; under torchrun it is one of them.",
    )
    add_lab_options(parser)
    add_job_options(parser)
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Start the workers, or be one."""
    job = job_of(asked)
    if not is_worker():
        check_before_launch(job)
        with launcher(lab_spec(asked)) as start:
            start(job)
        return 0
    try:
        result = work(job)
    except Exception as error:
        # One line from each worker that fails; the launcher says which was first.
        first_line = next(iter(str(error).splitlines()), "")
        cause = error if isinstance(error, LaconicError) else f"{type(error).__name__}: {first_line}"
        print(f"laconic: rank {os.environ['RANK']}: {cause}", file=sys.stderr, flush=True)
        if os.environ.get("LACONIC_TRACEBACK"):
            raise
        return 1
    if result is not None and not job.quiet:
        print(json.dumps(result.as_dict()) if job.json else _text(result), flush=True)
    return 0


def check_before_launch(job: Job) -> None:
    """Find what is missing before any worker starts, so that it is said once."""
    TASKS[job.task].load(job.data)
    if job.resume and job.out is not None:
        find_checkpoint(job.out)


def _text(result: Result) -> str:
    split = ", ".join(f"{name} {ms:.1f}" for name, ms in result.split_ms.items())
    ratio = f", {result.ratio:.1f}x fewer than dense fp32" if result.ratio else ""
    return (
        f"{result.scheme}: accuracy {100 * result.accuracy:.2f} %, loss {result.loss:.4f} after {result.steps} steps "
        f"in {result.seconds:.1f} s; {result.step_ms:.1f} ms a step ({split}); "
        f"{result.bytes_out:,} bytes out and {result.bytes_in:,} in per worker{ratio}"
    )
