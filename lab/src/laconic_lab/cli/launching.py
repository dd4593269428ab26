"""Where a job runs: worker processes on this machine, or one worker on each host of a lab."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from laconic.cli import say
from laconic.errors import LaunchError
from laconic_lab.cli.lab import add_spec, is_shaped, spec_of
from laconic_lab.errors import LabError
from laconic_lab.network import Lab, LabSpec, noted_signals
from laconic_lab.network import run as run_in_lab
from laconic_lab.train import DIVERGED, Job, launch, verdict, work_in_process, worker_command
from laconic_lab.train.mps import shared_gpu
from laconic_lab.train.progress import WATCHED
from laconic_lab.train.result import Result

Launcher = Callable[[Job], int]  # 0, or DIVERGED
AS_RANK = 'RANK=$LACONIC_HOST WORLD_SIZE=$LACONIC_HOSTS LOCAL_RANK=0 exec "$0" "$@"'  # a host of a lab as a rank


def add_lab_options(parser: argparse.ArgumentParser) -> None:
    """--hosts, --link and what else shapes links: run in a lab."""
    add_spec(parser, "of a lab to run in, one worker on each, instead of --workers here")


def lab_spec(asked: argparse.Namespace) -> LabSpec | None:
    """The lab that was asked for, if any."""
    if asked.hosts is None:
        if is_shaped(asked):
            raise LabError("--link and the like shape the hosts of a lab; give --hosts too")
        return None
    if getattr(asked, "in_process", False):
        raise LabError("--in-process has no hosts; leave --hosts out")
    if hasattr(asked, "workers"):
        raise LabError("--hosts puts one worker on each host; leave --workers out")
    return spec_of(asked)


def num_workers(job: Job, spec: LabSpec | None) -> int:
    """How many workers a job has: one on each host that does not serve, or as many as it says."""
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
            return work_in_process(job, tell, _say_unless_shown) if job.in_process else _sharing_gpus(launch, job, spec)

        yield start
        return
    with noted_signals() as signals, Lab.create(spec) as lab:
        yield lambda job: _sharing_gpus(partial(_launch_on_hosts, lab, signals), job, spec)


def _say_unless_shown(text: str) -> None:
    if WATCHED not in os.environ:
        say(text)


def link_bits_per_s(job: Job, spec: LabSpec | None) -> int | None:
    """The rate of the link of the worker that writes the records: servers come first."""
    return spec.links[job.servers].bits_per_s if spec else None


def _sharing_gpus(start: Launcher, job: Job, spec: LabSpec | None) -> int:
    with shared_gpu(job, num_workers(job, spec), say):
        return start(job)


def _launch_on_hosts(lab: Lab, signals: list[int], job: Job) -> int:
    """One rank on each host, servers first; only the worker that leads prints results."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(lab.hosts))))
    env = {"OMP_NUM_THREADS": threads}
    command = ["sh", "-c", AS_RANK, *worker_command(replace(job, workers=len(lab.hosts) - job.servers))]
    code = run_in_lab(lab, command, signals, env=env, marked=False, verdict=partial(verdict, job=job))
    if signals:
        raise KeyboardInterrupt
    if code and code != DIVERGED:
        raise LaunchError(f"a host of the lab ended with exit code {code}; all were stopped")
    return code
