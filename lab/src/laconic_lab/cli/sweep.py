"""laconic compare --suite links: where each scheme pays, and where dense is better."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from laconic.cli import number, table
from laconic_lab.cli.job_options import setting
from laconic_lab.cli.lab import roughness
from laconic_lab.cli.launching import launcher
from laconic_lab.cli.live import Runs, watched
from laconic_lab.cli.page_so_far import open_in_browser
from laconic_lab.compare import Run, folder_of, quartiles
from laconic_lab.errors import TaskError
from laconic_lab.network import LabSpec, Link
from laconic_lab.records import Recorder
from laconic_lab.report import write_report
from laconic_lab.train import Job

_RATES = ("10mbit", "100mbit", "1gbit", "none")
_HOSTS = 4
_STEPS = 16  # at 10mbit a dense step of the 1.2 M parameter net takes seven seconds


@dataclass(frozen=True)
class Point:
    """One scheme on one link; speed-up is of the median step time, since accuracy by step is the same on every link."""

    link: str
    scheme: str
    step_ms: float
    step_ms_quartiles: tuple[float, float]
    speedup: float | None
    speedup_bf16: float | None


def sweep_spec(job: Job, asked: argparse.Namespace) -> LabSpec:
    """The lab of a sweep, before it has links; an error where something is asked that the sweep chooses itself."""
    targets = (asked.target, asked.target_loss)
    if asked.network or asked.link or asked.link_of or targets != (None, None) or hasattr(asked, "workers"):
        raise TaskError(
            "--suite links chooses the rates, times steps and puts a worker on each of --hosts; "
            "leave --network, --link, --link-of, --target, --target-loss and --workers out"
        )
    if job.epochs is not None:
        raise TaskError("--suite links times steps; give --steps instead of --epochs")
    return LabSpec(_HOSTS if asked.hosts is None else asked.hosts)


def sweep(job: Job, schemes: list[str], out: Path, asked: argparse.Namespace) -> str:
    """Time every scheme on every link; the table, or one JSON object."""
    hosts = sweep_spec(job, asked).hosts
    job = replace(job, steps=job.steps or _STEPS, eval_every=10**9)
    points = []
    with Recorder(out) as records:
        what = setting(
            job, LabSpec(hosts), rounds=asked.rounds, steps=job.steps or _STEPS, target=None, measure=job.measure.name
        )
        records.write("comparison", **{**what, "link": None})
        for rate in _RATES:
            shaped = replace(Link.parse(rate), **roughness(asked))
            link = str(shaped)
            step_ms: dict[str, list[float]] = {scheme: [] for scheme in schemes}
            turns = range(1, asked.rounds + 1)
            folders = {s: [out / link / folder_of(s) / f"round-{turn}" for turn in turns] for s in schemes}
            runs = Runs(folders, job.steps or _STEPS, job.measure, shaped.bits_per_s)
            with launcher(LabSpec(hosts, shaped)) as start, watched(runs) as is_shown:
                for turn in turns:
                    for scheme in schemes:
                        if not is_shown:
                            told = f"laconic: {scheme} at {link} (round {turn} of {asked.rounds})"
                            print(told, file=sys.stderr, flush=True)
                        folder = folders[scheme][turn - 1]
                        start(replace(job, scheme=scheme, out=folder))
                        step_ms[scheme] += [fact["ms"] for fact in Run.read(folder).steps]
            for point in _points(link, step_ms):
                records.write("sweep", **asdict(point))
                points.append(point)
            if job.out is not None:
                page = write_report(out, running=f"Running, and done up to {link}.")
                if asked.open and rate == _RATES[0]:
                    open_in_browser(page)
    return json.dumps({"points": [asdict(point) for point in points]}) if asked.json else _text(points)


def _points(link: str, step_ms: dict[str, list[float]]) -> list[Point]:
    medians = {scheme: statistics.median(times) for scheme, times in step_ms.items()}

    def against(reference: str, scheme: str) -> float | None:
        return medians[reference] / medians[scheme] if reference in medians else None

    return [
        Point(link, scheme, medians[scheme], quartiles(times), against("dense", scheme), against("bf16", scheme))
        for scheme, times in step_ms.items()
    ]


def _text(points: list[Point]) -> str:
    rows = [
        [
            point.scheme,
            point.link,
            f"{point.step_ms:.1f}",
            "-".join(f"{quartile:.0f}" for quartile in point.step_ms_quartiles),
            number(point.speedup, ".2f", "x"),
            number(point.speedup_bf16, ".2f", "x"),
        ]
        for point in points
    ]
    return table(["scheme", "link", "step ms", "quartiles", "vs dense", "vs bf16"], rows)
