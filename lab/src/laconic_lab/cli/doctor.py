"""laconic doctor --hosts 4: what it finds on the hosts of a lab."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from laconic_lab.cli.lab import add_spec, is_shaped, spec_of
from laconic_lab.cli.launching import AS_RANK
from laconic_lab.errors import LabError, LaunchError
from laconic_lab.network import Lab, Link, noted_signals
from laconic_lab.network import run as run_in_lab

_FOUND = 1  # the exit code of `laconic doctor --strict` where something was found


def extend(parser: argparse.ArgumentParser) -> None:
    """Let the library's `laconic doctor` look at a lab too."""
    add_spec(parser, "of a lab to look at")
    look_here: Callable[[argparse.Namespace], int] = parser.get_default("run")
    parser.set_defaults(run=lambda asked: _look(asked, look_here))


def _look(asked: argparse.Namespace, look_here: Callable[[argparse.Namespace], int]) -> int:
    if asked.hosts is not None:
        return _in_a_lab(asked)
    if is_shaped(asked):
        raise LabError("--link and the like shape the hosts of a lab; give --hosts too")
    return look_here(asked)


def _in_a_lab(asked: argparse.Namespace) -> int:
    """One rank on each host; links are to carry what the lab was asked for, unless --nominal says otherwise."""
    spec = spec_of(asked)
    nominal = asked.nominal or spec.link.bits_per_s
    words = ["--nominal", str(Link(nominal))] * (nominal is not None)
    words += ["--json"] * asked.json + ["--strict"] * asked.strict
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // spec.hosts)))}
    with noted_signals() as signals, Lab.create(spec) as lab:
        command = ["sh", "-c", AS_RANK, sys.executable, "-m", "laconic", "doctor", *words]
        code = run_in_lab(lab, command, signals, env=env, marked=False)
        if signals:
            raise KeyboardInterrupt
    if code not in (0, _FOUND):
        raise LaunchError(f"a host of the lab ended with exit code {code}; all were stopped")
    return code
