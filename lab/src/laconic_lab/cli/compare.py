"""laconic compare and report: the same job under several schemes, a table, and a report."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from laconic.cli import number, table
from laconic.recipes import parse
from laconic_lab.cli import jobs
from laconic_lab.cli.live import PageSoFar, Runs, open_in_browser, watched
from laconic_lab.cli.train import check_before_launch
from laconic_lab.compare import Comparison, compare, conclusion, round_of
from laconic_lab.errors import TaskError
from laconic_lab.figures import MEASURES, Measure, Place, columns
from laconic_lab.network import LabSpec
from laconic_lab.records import Recorder, to_json
from laconic_lab.report import write_report
from laconic_lab.train import Job

_DEFAULT = ("dense", "bf16", "topk:rho=0.01")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic compare`."""
    parser = commands.add_parser(
        "compare",
        help="train the same job under several schemes and print a table",
        description="Run the same job, with the same seeds, under each scheme. "
        "Speed-up is by training time to a target accuracy or loss. With --out, DIR/report.html shows it all.",
    )
    parser.add_argument(
        "--scheme", action="append", metavar="NAME", help=f"a scheme; repeat it (default {', '.join(_DEFAULT)})"
    )
    parser.add_argument(
        "--target", type=float, metavar="X", help="accuracy to time (default: that of dense less one point)"
    )
    parser.add_argument(
        "--target-loss", type=float, metavar="X", help="validation loss to time (default: that of dense plus 2 %%)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="runs of each scheme, interleaved (default 1)"
    )
    parser.add_argument("--open", action="store_true", help="open the page of --out in a browser; it grows run by run")
    jobs.add_lab_options(parser)
    jobs.add_job_options(parser, without=("scheme", "no_checkpoint", "resume", "quiet"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train under each scheme in turn, round after round, then print the table, and what it comes to."""
    schemes = [str(parse(text)) for text in args.scheme or _DEFAULT]
    _check(args, schemes)
    job, *_ = [jobs.job_of(args, scheme=scheme, json=False, quiet=True, no_checkpoint=True) for scheme in schemes]
    spec = jobs.lab_spec(args)
    if job.out is not None and job.out.is_dir() and any(job.out.iterdir()):
        raise TaskError(f"{job.out} is not empty; give --out a new folder, or remove what is in this one")
    num_steps = check_before_launch(job, jobs.num_workers(job, spec))
    with _folder(job.out) as out:
        bits_per_s = jobs.link_bits_per_s(job, spec)
        measure, target = _goal(args, job)
        what = jobs.setting(job, spec, rounds=args.rounds, steps=num_steps, target=target, measure=measure.name)
        folders = {s: [round_of(out, s, number) for number in range(1, args.rounds + 1)] for s in schemes}
        page = PageSoFar(out, what, schemes, bits_per_s) if job.out is not None else None
        if page is not None and args.open:
            open_in_browser(page.write("Running."))
        _run_all(job, Runs(folders, num_steps, job.measure, bits_per_s), page, spec)
        comparison = compare(out, schemes, args.rounds, measure, target, bits_per_s)
        with Recorder(out) as records:
            records.write("comparison", **{**what, "steps": comparison.steps, "target": comparison.target})
            for row in comparison.rows:
                records.write("row", **row.as_dict())
        printed = to_json(comparison.as_dict()) if args.json else table_of(comparison)
        # On one machine, without links, time says little of a scheme.
        sentence = conclusion(comparison, is_timed=spec is not None)
        printed += f"\n\n{sentence}." * bool(sentence and not args.json)
        if job.out is not None:
            print(f"laconic: wrote {write_report(out)}", file=sys.stderr)
    print(printed, flush=True)
    return 0


def _check(args: argparse.Namespace, schemes: list[str]) -> None:
    if len(set(schemes)) < len(schemes):
        raise TaskError("a scheme is given twice; give each once")
    if args.target is not None and not 0 < args.target <= 1:
        raise TaskError(f"--target is {args.target}; give an accuracy between 0 and 1")
    if args.target_loss is not None and not args.target_loss > 0:
        raise TaskError(f"--target-loss is {args.target_loss}; give a number above 0")
    if args.target is not None and args.target_loss is not None:
        raise TaskError("--target and --target-loss are two targets; give one")
    if args.rounds < 1:
        raise TaskError(f"--rounds is {args.rounds}; give 1 or more")
    if args.open and not hasattr(args, "out"):
        raise TaskError("--open shows the page of a comparison; give --out DIR too")


def _goal(args: argparse.Namespace, job: Job) -> tuple[Measure, float | None]:
    """The measure that is timed, and to which target, None where a reference sets it."""
    if args.target_loss is not None:
        return MEASURES["loss"], args.target_loss
    if args.target is not None:
        return MEASURES["accuracy"], args.target
    return job.measure, None


def _run_all(job: Job, runs: Runs, page: PageSoFar | None, spec: LabSpec | None) -> None:
    rounds = max(map(len, runs.folders.values()))
    run_name = "before its first run"
    try:
        with jobs.launcher(spec) as start, watched(runs) as is_shown:
            for round_number in range(rounds):
                for place, (scheme, folders) in enumerate(runs.folders.items(), 1):
                    run_name = f"{scheme} ({place} of {len(runs.folders)}, round {round_number + 1} of {rounds})"
                    if page is not None:
                        page.write(f"Running: {run_name}.")
                    if not is_shown:
                        print(f"laconic: {run_name}", file=sys.stderr, flush=True)
                    start(replace(job, scheme=scheme, out=folders[round_number]))
    except BaseException:
        if page is not None:
            page.write(f"Broken off: {run_name}.", is_running=False)
        raise


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """--out, or one that goes when all is said."""
    if out is not None:
        yield out
    else:
        with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
            yield Path(scratch)


def table_of(comparison: Comparison) -> str:
    """A line for each scheme."""
    figures = [row.figures for row in comparison.rows]
    beside_bytes = columns(figures, Place.BYTES)
    at_end = columns(figures, Place.END)
    measure = MEASURES[comparison.measure]
    head = [
        *("scheme", measure.noun, f"s to {measure.text(comparison.target)}", "step ms", "quartiles", "select+encode"),
        *("bytes out/step", "in/step", *(figure.head for figure in beside_bytes)),
        *("ratio", "vs dense", "vs bf16", *(figure.head for figure in at_end)),
    ]
    rows = []
    for row in comparison.rows:
        lower, upper = row.step_ms_quartiles
        worth = measure.text(getattr(row, measure.name))
        if row.diverged_at is not None:
            worth = f"diverged at step {row.diverged_at}"
        preparing = 100 * (row.split_ms["select"] + row.split_ms["encode"]) / row.step_ms if row.step_ms else None
        seconds = number(row.seconds_to_target, ".1f")
        rows.append(
            [
                *(row.scheme, worth, seconds, f"{row.step_ms:.1f}", f"{lower:.0f}-{upper:.0f}"),
                *(number(preparing, ".1f", " %"), f"{row.bytes_out:,}", f"{row.bytes_in:,}"),
                *(figure.shown(row.figures.get(figure.name)) for figure in beside_bytes),
                number(row.ratio, ".1f", "x"),
                number(row.speedup, ".2f", "x"),
                number(row.speedup_bf16, ".2f", "x"),
                *(figure.shown(row.figures.get(figure.name)) for figure in at_end),
            ]
        )
    return table(head, rows)


def add_report_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic report`."""
    parser = commands.add_parser(
        "report",
        help="write DIR/report.html from the records of a comparison, or from a plan",
        description="Write DIR/report.html from what `laconic compare` or `laconic plan` left there by --out DIR. "
        "The page holds everything it needs and works offline.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what was given to --out")
    parser.set_defaults(run=_write_page)


def _write_page(args: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    print(write_report(args.folder), flush=True)
    return 0
