"""laconic train: one task under one scheme."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from laconic.cli import as_worker, is_worker
from laconic_lab.cli.jobs import (
    add_job_options,
    add_lab_options,
    job_of,
    lab_spec,
    launcher,
    link_bits_per_s,
    num_workers,
)
from laconic_lab.cli.live import Runs, can_show, watched
from laconic_lab.errors import TaskError
from laconic_lab.figures import MEASURES, sentences
from laconic_lab.records import make_writable, to_json
from laconic_lab.train import Job, work
from laconic_lab.train.checkpoint import find_checkpoint
from laconic_lab.train.result import Result, beside_dense
from laconic_lab.train.resume import check_resume
from laconic_lab.train.worker import check_device


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic train`."""
    parser = commands.add_parser(
        "train",
        help="train a task under a scheme, on this machine or under torchrun",
        description="Train a task under a scheme. Starts its own workers; under torchrun it is one of them.",
        epilog="""examples:
  laconic train --scheme topk:rho=0.01
  laconic train --hosts 4 --link 100mbit --scheme topk:rho=0.01 --out DIR
  laconic train --task chars --data FILE --model gpt-tiny --scheme streaming
  laconic train --out DIR --resume
  torchrun --nnodes 2 ... -m laconic train --scheme bf16""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_lab_options(parser)
    add_job_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the workers, or be one."""
    job = job_of(args)
    if not is_worker():
        if job.servers and not job.asks_servers:
            raise TaskError(f"{job.scheme} asks no server; leave --servers out, or give one that does, like overlap")
        spec = lab_spec(args)
        num_steps = check_before_launch(job, num_workers(job, spec))
        with ExitStack() as stack:
            start = stack.enter_context(launcher(spec, lambda result: _tell(result, job)))
            shown = job
            if can_show():
                if job.out is None:  # a view reads records, which go when all is said
                    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="laconic-"))
                    shown = replace(job, out=Path(folder), no_checkpoint=True)
                rate = link_bits_per_s(job, spec)
                runs = Runs({job.scheme: [Path(shown.out or "")]}, num_steps, job.measure, rate)
                stack.enter_context(watched(runs))
            return start(shown)
    return as_worker(lambda: work(job, lambda result: _tell(result, job)))


def check_before_launch(job: Job, num_workers: int) -> int:
    """Find what is missing before any worker starts, so that it is said once; the number of steps."""
    check_device(job.device)
    num_steps = job.num_steps(len(job.load_data().train_targets), num_workers)
    if job.out is None:
        return num_steps
    if job.resume:
        checkpoint = find_checkpoint(job.out)
        check_resume(job, num_steps, checkpoint, checkpoint.load(mapped=True))
    make_writable(job.out)
    return num_steps


def _tell(result: Result, job: Job) -> None:
    if not job.quiet:
        print(to_json(result.as_dict()) if job.json else _text(result, job), flush=True)
    if result.diverged_at is not None:
        print(
            f"laconic: {result.scheme} diverged: from step {result.diverged_at} on its loss is no number; "
            "try a smaller --lr or --momentum",
            file=sys.stderr,
            flush=True,
        )


def _text(result: Result, job: Job) -> str:
    # The task's own measure comes first, and says nothing twice.
    worth = dict.fromkeys((job.measure.name, *MEASURES))
    judged = ", ".join(f"{name} {MEASURES[name].text(getattr(result, name))}" for name in worth)
    split = ", ".join(f"{name} {ms:.1f}" for name, ms in result.split_ms.items())
    ratio = f", {beside} than dense fp32" if (beside := beside_dense(result.ratio)) else ""
    return (
        f"{result.scheme}: {judged} after {result.steps} steps "
        f"in {result.seconds:.1f} s; {result.step_ms:.1f} ms a step ({split}); "
        f"{result.bytes_out:,} bytes out and {result.bytes_in:,} in per worker{ratio}{_told_figures(result)}"
    )


def _told_figures(result: Result) -> str:
    """The figures that not every run has, in words."""
    remarks = sentences(result.figures)
    remarks += [f"worker {rank} {why}" for rank, why in result.lost_workers.items()]
    return "".join(f"; {text}" for text in remarks)
