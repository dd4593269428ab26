"""laconic inspect: how well a Laplace and a Gaussian fit the gradients of a real run, layer by layer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from laconic.cli import number, table
from laconic_lab.cli.jobs import add_job_options, job_of
from laconic_lab.errors import TaskError
from laconic_lab.inspect import Look, inspect
from laconic_lab.records import Recorder
from laconic_lab.report import write_report
from laconic_lab.train import Job

_STEPS = 50
# What a run in one process has no use for, and what is said otherwise here.
_WITHOUT = (
    *("scheme", "steps", "epochs", "eval_every", "backend", "device", "amp"),
    *("servers", "server_timeout", "wait", "flipped", "in_process"),
    *("out", "no_checkpoint", "resume", "quiet", "json"),
)
_HEAD = ("layer", "entries", "zeros", "mean |x|", "W1 Laplace", "W1 Gaussian", "closer", "t0/exact", "caught/k")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic inspect`."""
    parser = commands.add_parser(
        "inspect",
        help="which law a run's gradients follow, layer by layer",
        description="Train virtual workers in one process, and at some steps compare worker 0's gradient and balance "
        "with a Laplace and a Gaussian: their distance, and the threshold that the Laplace foretells.",
    )
    parser.add_argument("--at", metavar="N,N", help="steps to look at, from 1 (default: the last)")
    parser.add_argument("--rho", type=float, default=0.01, metavar="X", help="share that is sent (default 0.01)")
    parser.add_argument("--scheme", metavar="NAME", help="what trains it (default topk at --rho)")
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"steps to train (default {_STEPS})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for records and a page of plots, report.html")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_job_options(parser, without=_WITHOUT)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, look, print a table for each look."""
    job = job_of(args, scheme=args.scheme or f"topk:rho={args.rho}")
    at = _steps(args.at) if args.at else [args.steps]
    what = _setting(job, at, args.rho)
    with Recorder(args.out) as records:
        records.write("inspection", **what)
        looks = inspect(job, at, args.rho, lambda line: print(f"laconic: {line}", file=sys.stderr, flush=True))
        for look in looks:
            records.write("fit", **look.as_dict(), tail=look.tail)
    if args.out is not None:
        print(f"laconic: wrote {write_report(args.out)}", file=sys.stderr)
    if args.json:
        print(json.dumps({**what, "fits": [look.as_dict() for look in looks]}), flush=True)
    else:
        groups = groupby(looks, lambda look: (look.step, look.of))
        print("\n\n".join(_text(list(some), args.rho) for _, some in groups), flush=True)
    return 0


def _steps(text: str) -> list[int]:
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise TaskError(f"--at is {text!r}; give steps with commas between them, as in --at 10,50") from None


def _setting(job: Job, at: Sequence[int], rho: float) -> dict[str, Any]:
    """The setting of an inspection, as a fact for the records."""
    names = ("task", "model", "scheme", "workers", "steps", "seed")
    return {**{name: getattr(job, name) for name in names}, "batch": job.training.batch, "at": list(at), "rho": rho}


def _text(looks: Sequence[Look], rho: float) -> str:
    title = f"{looks[0].of} of worker 0 at step {looks[0].step}; thresholds for the largest {100 * rho:g} %"
    return f"{title}\n{table(_HEAD, [_row(look) for look in looks])}"


def _row(look: Look) -> list[str]:
    fit = look.fit
    return [
        look.layer or "(whole model)",
        f"{fit.entries:,}",
        number(100 * fit.zeros / fit.entries if fit.entries else None, ".1f", " %"),
        f"{fit.mean_abs:.2e}",
        number(fit.w1_laplace, ".3f"),
        number(fit.w1_gaussian, ".3f"),
        fit.closer or "-",
        number(fit.threshold_ratio, ".2f"),
        number(fit.caught_ratio, ".2f"),
    ]
