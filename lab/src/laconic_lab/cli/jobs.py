"""A job's fields as command-line options, and where it runs: processes on this machine, or the hosts of a lab."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from laconic.cli import say
from laconic_lab.cli.lab import add_spec, is_shaped, spec_of
from laconic_lab.errors import LabError, LaunchError
from laconic_lab.network import Lab, LabSpec, Link, noted_signals
from laconic_lab.network import run as run_in_lab
from laconic_lab.train import DIVERGED, Job, launch, verdict, work_in_process, worker_command
from laconic_lab.train.launch import threads_each
from laconic_lab.train.mps import shared_gpu
from laconic_lab.train.result import Result

Launcher = Callable[[Job], int]  # 0, or DIVERGED
_AS_RANK = 'RANK=$LACONIC_HOST WORLD_SIZE=$LACONIC_HOSTS LOCAL_RANK=0 exec "$0" "$@"'  # a host of a lab as a rank

_PROBLEMS = 1  # the exit code of `laconic doctor --strict` where something was found


def say_if_busy() -> None:
    """Warn where other work makes times of this machine worthless."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        say(f"laconic: this machine is busy (a load of {load:.1f} on {cores} cores); wait, or trust no time below")


_GROUPS = {
    "what is trained": "task model data seed labels_per_worker",
    "how it is trained": "steps epochs batch context optimizer lr warmup schedule momentum betas weight_decay "
    "clip_norm accumulate amp",
    "what is sent": "scheme auto no_pipeline flipped",
    "where it runs": "workers servers server_timeout wait in_process backend device",
    "what is written": "eval_every out no_checkpoint resume quiet json",
}


def add_job_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """One option for each field of Job; one that is not given is not in the namespace, and Job knows its default."""
    hints = get_type_hints(Job)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for title, names in _GROUPS.items():
        groups |= dict.fromkeys(names.split(), parser.add_argument_group(title))
    for option in fields(Job):
        if option.name in without:
            continue
        group = groups[option.name]
        name = f"--{option.name.replace('_', '-')}"
        meaning = str(option.metadata["meaning"]).replace("%", "%%")
        if hints[option.name] is bool:
            group.add_argument(name, action="store_true", help=meaning)
        else:
            kind = next(t for t in (*get_args(hints[option.name]), hints[option.name]) if t is not type(None))
            shown = f"{meaning} (default {option.default})" if option.default is not None else meaning
            group.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=_metavar(kind), help=shown)


def job_of(args: argparse.Namespace, **instead: Any) -> Job:
    """The job that was asked for, with some fields replaced."""
    return Job(**{**given_options(args), **instead})


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a job that were given, by the name of its field."""
    return {option.name: getattr(args, option.name) for option in fields(Job) if hasattr(args, option.name)}


def setting(
    job: Job, spec: LabSpec | None, *, rounds: int, steps: int, target: float | None, measure: str
) -> dict[str, Any]:
    """The facts that head a comparison's records; hosts and link are None outside a lab."""
    return {
        **job.facts(),
        "steps": steps,
        "batch": job.training.batch,
        "workers": spec.hosts - job.servers if spec else job.workers,
        "hosts": spec.hosts if spec else None,
        "link": str(spec.link) if spec else None,
        "link_of": {str(host): str(link) for host, link in spec.link_of.items()} if spec else {},
        "slow_of": {str(host): slowdown for host, slowdown in spec.slow_of.items()} if spec else {},
        "rounds": rounds,
        "target": target,
        "measure": measure,
    }


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "NAME")


def add_lab_options(parser: argparse.ArgumentParser) -> None:
    """--hosts, --link and what else shapes links: run in a lab."""
    lab = parser.add_argument_group("hosts on slow links, made on this machine")
    add_spec(lab, "of a lab to run in, one worker on each, instead of --workers here")


def lab_spec(args: argparse.Namespace) -> LabSpec | None:
    """The lab that was asked for, if any; an error where something is asked of links alone."""
    if args.hosts is None:
        if is_shaped(args):
            raise LabError("--link and the like shape the hosts of a lab; give --hosts too")
        return None
    if getattr(args, "in_process", False):
        raise LabError("--in-process has no hosts; leave --hosts out")
    if hasattr(args, "workers"):
        raise LabError("--hosts puts one worker on each host; leave --workers out")
    return spec_of(args)


def num_workers(job: Job, spec: LabSpec | None) -> int:
    """The number of a job's workers: one on each host that does not serve, or as many as it says."""
    if spec is not None and spec.hosts <= job.servers:
        raise LabError(f"{spec.hosts} hosts are no more than --servers {job.servers}; give --hosts more than that")
    return spec.hosts - job.servers if spec else job.workers


@contextmanager
def launcher(spec: LabSpec | None, tell: Callable[[Result], None] = lambda result: None) -> Iterator[Launcher]:
    """A way to run jobs; the lab, if it is one, lives as long as the block.

    `tell` is for results of jobs that run in this process; workers tell their own.
    """
    if spec is None:

        def start(job: Job) -> int:
            return work_in_process(job, tell, say) if job.in_process else _sharing_gpus(launch, job, spec)

        yield start
        return
    with noted_signals() as signals, Lab.create(spec) as lab:
        yield lambda job: _sharing_gpus(partial(_launch_on_hosts, lab, signals), job, spec)


def link_bits_per_s(job: Job, spec: LabSpec | None) -> int | None:
    """The rate of the link of the worker that writes the records: servers come first."""
    return spec.links[job.servers].bits_per_s if spec else None


def _sharing_gpus(start: Launcher, job: Job, spec: LabSpec | None) -> int:
    with shared_gpu(job, num_workers(job, spec), say):
        return start(job)


def _launch_on_hosts(lab: Lab, signals: list[int], job: Job) -> int:
    """One rank on each host, servers first; only the worker that leads prints results."""
    words = worker_command(replace(job, workers=len(lab.hosts) - job.servers))
    return run_ranks(lab, signals, words, DIVERGED, partial(verdict, job=job))


def run_ranks(
    lab: Lab,
    signals: list[int],
    words: Sequence[str],
    allowed: int,
    verdict: Callable[[Sequence[int | None]], int] | None = None,
) -> int:
    """Run a command on each host, which is a rank; 0 or the exit code that is `allowed`, and else an error."""
    env = {"OMP_NUM_THREADS": threads_each(len(lab.hosts))}
    code = run_in_lab(lab, ["sh", "-c", _AS_RANK, *words], signals, env=env, marked=False, verdict=verdict)
    if signals:
        raise KeyboardInterrupt
    if code not in (0, allowed):
        raise LaunchError(f"a host of the lab ended with exit code {code}; all were stopped")
    return code


def extend_doctor(parser: argparse.ArgumentParser) -> None:
    """Let the library's `laconic doctor` look at a lab too."""
    add_spec(parser, "of a lab to look at")
    look_here: Callable[[argparse.Namespace], int] = parser.get_default("run")
    parser.set_defaults(run=lambda args: _in_a_lab(args, spec) if (spec := lab_spec(args)) else look_here(args))


def _in_a_lab(args: argparse.Namespace, spec: LabSpec) -> int:
    """One rank on each host; links are to carry what the lab was asked for, unless --nominal says otherwise."""
    nominal = args.nominal or spec.link.bits_per_s
    words = ["--nominal", str(Link(nominal))] * (nominal is not None)
    words += ["--json"] * args.json + ["--strict"] * args.strict
    with noted_signals() as signals, Lab.create(spec) as lab:
        return run_ranks(lab, signals, [sys.executable, "-m", "laconic", "doctor", *words], _PROBLEMS)
