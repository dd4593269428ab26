"""laconic compare: the same job under several schemes, a table, and a report."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from laconic.cli import number, table
from laconic.recipes import parse
from laconic_lab.cli.job_options import add_job_options, job_of, setting
from laconic_lab.cli.launching import add_lab_options, lab_spec, launcher, link_bits_per_s, num_workers
from laconic_lab.cli.live import Runs, watched
from laconic_lab.cli.page_so_far import PageSoFar, open_in_browser
from laconic_lab.cli.sweep import sweep, sweep_spec
from laconic_lab.cli.train import check_before_launch
from laconic_lab.compare import Comparison, compare, conclusion, round_of
from laconic_lab.errors import TaskError
from laconic_lab.figures import Place, columns
from laconic_lab.measures import MEASURES, Measure
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
    parser.add_argument(
        "--suite",
        choices=("links",),
        help="links: step times at 10mbit, 100mbit, 1gbit and none, with --delay and --loss if given, not accuracy",
    )
    parser.add_argument("--open", action="store_true", help="open the page of --out in a browser; it grows as they run")
    add_lab_options(parser)
    add_job_options(parser, without=("scheme", "no_checkpoint", "resume", "tensorboard", "quiet"))
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace, *, is_timed: bool = True) -> int:
    """Train under each scheme in turn, round after round, then print the table, and what it comes to."""
    schemes = [str(parse(text)) for text in asked.scheme or _DEFAULT]
    _check(asked, schemes)
    job, *_ = [job_of(asked, scheme=scheme, json=False, quiet=True, no_checkpoint=True) for scheme in schemes]
    spec = sweep_spec(job, asked) if asked.suite is not None else lab_spec(asked)
    if job.out is not None and job.out.is_dir() and any(job.out.iterdir()):
        raise TaskError(f"{job.out} is not empty; give --out a new folder, or remove what is in this one")
    num_steps = check_before_launch(job, num_workers(job, spec))
    with _folder(job.out) as out:
        if asked.suite is not None:
            printed = sweep(job, schemes, out, asked)
        else:
            bits_per_s = link_bits_per_s(job, spec)
            measure, target = _goal(asked, job)
            what = setting(job, spec, rounds=asked.rounds, steps=num_steps, target=target, measure=measure.name)
            folders = {s: [round_of(out, s, turn) for turn in range(1, asked.rounds + 1)] for s in schemes}
            page = PageSoFar(out, what, schemes, asked.rounds, bits_per_s) if job.out is not None else None
            if page is not None and asked.open:
                open_in_browser(page.write())
            _run_all(job, Runs(folders, num_steps, job.measure, bits_per_s), page, spec)
            found = compare(out, schemes, asked.rounds, measure, target, bits_per_s, is_timed=is_timed)
            with Recorder(out) as records:
                records.write("comparison", **{**what, "steps": found.steps, "target": found.target})
                for row in found.rows:
                    records.write("row", **row.as_dict())
            printed = to_json(found.as_dict()) if asked.json else _text(found)
            # On one machine, without links, time says little of a scheme.
            said = conclusion(found, is_timed=is_timed and spec is not None)
            printed += f"\n\n{said}." * bool(said and not asked.json)
        if job.out is not None:
            print(f"laconic: wrote {write_report(out)}", file=sys.stderr)
    print(printed, flush=True)
    return 0


def _check(asked: argparse.Namespace, schemes: list[str]) -> None:
    if len(set(schemes)) < len(schemes):
        raise TaskError("a scheme is given twice; give each once")
    if asked.target is not None and not 0 < asked.target <= 1:
        raise TaskError(f"--target is {asked.target}; give an accuracy between 0 and 1")
    if asked.target_loss is not None and not asked.target_loss > 0:
        raise TaskError(f"--target-loss is {asked.target_loss}; give a number above 0")
    if asked.target is not None and asked.target_loss is not None:
        raise TaskError("--target and --target-loss are two targets; give one")
    if asked.rounds < 1:
        raise TaskError(f"--rounds is {asked.rounds}; give 1 or more")
    if asked.open and not hasattr(asked, "out"):
        raise TaskError("--open shows the page of a comparison; give --out DIR too")


def _goal(asked: argparse.Namespace, job: Job) -> tuple[Measure, float | None]:
    """What is timed, and to which target, None where a reference sets it."""
    if asked.target_loss is not None:
        return MEASURES["loss"], asked.target_loss
    if asked.target is not None:
        return MEASURES["accuracy"], asked.target
    return job.measure, None


def _run_all(job: Job, runs: Runs, page: PageSoFar | None, spec: LabSpec | None) -> None:
    rounds = max(map(len, runs.folders.values()))
    with ExitStack() as stack:
        if page is not None:
            stack.push(page.break_off)
        start = stack.enter_context(launcher(spec))
        is_shown = stack.enter_context(watched(runs, page.update if page is not None else None))
        for turn in range(rounds):
            for place, (scheme, folders) in enumerate(runs.folders.items(), 1):
                told = f"{scheme} ({place} of {len(runs.folders)}, round {turn + 1} of {rounds})"
                if page is not None:
                    page.told = told
                if not is_shown:
                    print(f"laconic: {told}", file=sys.stderr, flush=True)
                start(replace(job, scheme=scheme, out=folders[turn]))


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """--out, or one that goes when all is said."""
    if out is not None:
        yield out
    else:
        with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
            yield Path(scratch)


def _text(found: Comparison) -> str:
    figures = [row.figures for row in found.rows]
    beside_bytes = columns(figures, Place.BYTES)
    at_end = columns(figures, Place.END)
    measure = MEASURES[found.measure]
    head = [
        *("scheme", measure.noun, f"s to {measure.text(found.target)}", "step ms", "quartiles", "select+encode"),
        *("bytes out/step", "in/step", *(figure.head for figure in beside_bytes)),
        *("ratio", "vs dense", "vs bf16", *(figure.head for figure in at_end)),
    ]
    rows = []
    for row in found.rows:
        lower, upper = row.step_ms_quartiles
        worth = measure.text(getattr(row, measure.name))
        if row.diverged_at is not None:
            worth = f"diverged at step {row.diverged_at}"
        preparing = 100 * (row.split_ms["select"] + row.split_ms["encode"]) / row.step_ms if row.step_ms else None
        rows.append(
            [
                *(
                    row.scheme,
                    worth,
                    _or_more(row.seconds_to_target, row.seconds_more_than, ".1f"),
                    f"{row.step_ms:.1f}",
                ),
                *(
                    f"{lower:.0f}-{upper:.0f}",
                    number(preparing, ".1f", " %"),
                    f"{row.bytes_out:,}",
                    f"{row.bytes_in:,}",
                ),
                *(figure.shown(row.figures.get(figure.name)) for figure in beside_bytes),
                number(row.ratio, ".1f", "x"),
                _or_more(row.speedup, row.speedup_more_than, ".2f", "x"),
                _or_more(row.speedup_bf16, row.speedup_bf16_more_than, ".2f", "x"),
                *(figure.shown(row.figures.get(figure.name)) for figure in at_end),
            ]
        )
    return table(head, rows)


def _or_more(value: float | None, more_than: float | None, form: str, unit: str = "") -> str:
    """A number, or the one that it is known to be above."""
    return f"> {more_than:{form}}{unit}" if value is None and more_than is not None else number(value, form, unit)
