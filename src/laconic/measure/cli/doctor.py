"""laconic doctor: what is slow or wrong here, each finding with its cure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from laconic.errors import LabError, LaunchError
from laconic.measure.cli.lab import add_spec, is_shaped, spec_of
from laconic.measure.cli.launching import AS_RANK, as_worker
from laconic.measure.cli.table import table
from laconic.measure.lab import Lab, Link, noted_signals
from laconic.measure.lab import run as run_in_lab
from laconic.measure.records import to_json
from laconic.measure.train import is_worker

if TYPE_CHECKING:
    from laconic.measure.doctor import Finding

_FOUND, _FAILED = 1, 2
_SILENCE_S = 60  # after which a rank that waits for another gives up


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="find what is slow or wrong with hosts and network, and say the cure",
        description="Find what is slow or wrong. Alone it looks at this host; under torchrun, or on the hosts of a "
        "lab, at all of them and at what is between them.",
    )
    add_spec(parser, "of a lab to look at")
    parser.add_argument(
        "--nominal", type=Link.parse, metavar="RATE", help="what links should carry (default what interfaces say)"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="by which (default gloo)")
    parser.add_argument("--json", action="store_true", help="a JSON list of findings on stdout")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where something was found")
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Look at this host, at those of the group that this process is in, or at those of a lab."""
    if is_worker():
        return as_worker(lambda: _be_one(asked), failed=_FAILED)
    if asked.hosts is not None:
        return _in_a_lab(asked)
    if is_shaped(asked):
        raise LabError("--link and the like shape the hosts of a lab; give --hosts too")
    from laconic.measure.doctor import examine

    return _tell(examine(), asked, "of what one host shows alone; run it under torchrun to look between hosts")


def _be_one(asked: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from laconic.measure.doctor import examine
    from laconic.transport import world

    if asked.backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(asked.backend, timeout=timedelta(seconds=_SILENCE_S))
    except RuntimeError as error:
        raise LaunchError(
            f"the ranks did not meet within {_SILENCE_S} s: see that all run, and reach MASTER_ADDR and each other "
            f"through their firewalls ({' '.join(str(error).split()):.140})"
        ) from None
    nominal = asked.nominal.bits_per_s if asked.nominal else None
    found = examine(world(), nominal_bits_per_s=nominal)
    leads = dist.get_rank() == 0
    looked_at = f"between {dist.get_world_size()} ranks over {asked.backend}"
    dist.destroy_process_group()
    return _tell(found, asked, looked_at) if leads else _code(found, asked)


def _in_a_lab(asked: argparse.Namespace) -> int:
    """One rank on each host; links are to carry what the lab was asked for, unless --nominal says otherwise."""
    spec = spec_of(asked)
    nominal = asked.nominal or spec.link
    words = ["--nominal", str(Link(nominal.bits_per_s))] * (nominal.bits_per_s is not None)
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


def _tell(found: Sequence[Finding], asked: argparse.Namespace, looked_at: str) -> int:
    if asked.json:
        print(to_json([asdict(finding) for finding in found]), flush=True)
    elif found:
        rows = [[one.name, one.host, one.measured, one.expected, one.cure] for one in found]
        print(table(["found", "host", "measured", "expected", "cure"], rows, num_left=5), flush=True)
    else:
        print(f"nothing found {looked_at}", flush=True)
    return _code(found, asked)


def _code(found: Sequence[Finding], asked: argparse.Namespace) -> int:
    return _FOUND if found and asked.strict else 0
