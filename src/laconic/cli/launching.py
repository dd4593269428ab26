"""Where a job runs: worker processes on this machine, or one worker on each host of a lab."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from laconic.cli.lab import add_spec, spec_of
from laconic.errors import LabError, LaunchError
from laconic.lab import Lab, LabSpec, noted_signals
from laconic.lab import run as run_in_lab
from laconic.train import DIVERGED, Job, launch

Launcher = Callable[[Job], int]  # 0, or DIVERGED
# Where this is set, a launcher that ends badly does so in silence: whoever runs the lab says it, once.
SAID_ABOVE = "LACONIC_SAID_ABOVE"


def add_lab_options(parser: argparse.ArgumentParser) -> None:
    """--hosts, --link and --link-of: run in a lab."""
    add_spec(parser, "of a lab to run in, one worker on each, instead of --workers here")


def lab_spec(asked: argparse.Namespace) -> LabSpec | None:
    """The lab that was asked for, if any."""
    if asked.hosts is None:
        if asked.link or asked.link_of:
            raise LabError("--link and --link-of shape the hosts of a lab; give --hosts too")
        return None
    if hasattr(asked, "workers"):
        raise LabError("--hosts puts one worker on each host; leave --workers out")
    return spec_of(asked)


@contextmanager
def launcher(spec: LabSpec | None) -> Iterator[Launcher]:
    """A way to run jobs; the lab, if it is one, lives as long as the block."""
    if spec is None:
        yield launch
        return
    with noted_signals() as signals, Lab.create(spec) as lab:
        yield lambda job: _launch_on_hosts(lab, job, signals)


def _launch_on_hosts(lab: Lab, job: Job, signals: list[int]) -> int:
    """One launcher and one worker per host, as on machines of their own; only rank 0 prints results."""
    command = [sys.executable, "-m", "laconic", "train", *replace(job, workers=1).arguments()]
    if job.is_gossip:  # torchrun would end all workers when one dies, and wait minutes for its launcher
        command = ["sh", "-c", 'RANK=$LACONIC_HOST WORLD_SIZE=$LACONIC_HOSTS LOCAL_RANK=0 exec "$@"', "sh", *command]
    threads = max(1, (os.cpu_count() or 1) // len(lab.hosts))
    env = {"OMP_NUM_THREADS": str(threads), SAID_ABOVE: "1"}
    code = run_in_lab(lab, command, signals, env=env, marked=False, outlives=job.is_gossip)
    if signals:
        raise KeyboardInterrupt
    if code and code != DIVERGED:
        raise LaunchError(f"a host of the lab ended with exit code {code}; all were stopped")
    return code
