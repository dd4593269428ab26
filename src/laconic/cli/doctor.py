"""laconic doctor: what is slow or wrong here, each finding with its cure."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from laconic.cli.console import as_worker, is_worker, table, to_json
from laconic.errors import PeerError

if TYPE_CHECKING:
    from laconic.doctor import Finding

_STRICT, _FAILED = 1, 2
_TIMEOUT_S = 60  # after which a rank that waits for another gives up


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic doctor`."""
    from laconic.planning import parse_rate

    parser = commands.add_parser(
        "doctor",
        help="find what is slow or wrong with hosts and network, and say the cure",
        description="Find what is slow or wrong. Alone it looks at this host; under torchrun, at all of them and at "
        "what is between them; with the lab installed, at the hosts of a lab.",
    )
    parser.add_argument(
        "--nominal", type=parse_rate, metavar="RATE", help="what links should carry (default what interfaces say)"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="by which (default gloo)")
    parser.add_argument("--json", action="store_true", help="a JSON list of findings on stdout")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where something was found")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look at this host, or at those of the group that this process is in."""
    if is_worker():
        return as_worker(lambda: _look_between(arguments), failed=_FAILED)
    from laconic.doctor import examine

    return _print(examine(), arguments, "of what one host shows alone; run it under torchrun to look between hosts")


def _look_between(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from laconic.doctor import examine
    from laconic.transport import world

    if arguments.backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(arguments.backend, timeout=timedelta(seconds=_TIMEOUT_S))
    except RuntimeError as error:
        raise PeerError(
            f"the ranks did not meet within {_TIMEOUT_S} s: see that all run, and reach MASTER_ADDR and each other "
            f"through their firewalls ({' '.join(str(error).split()):.140})"
        ) from None
    findings = examine(world(), nominal_bits_per_s=arguments.nominal)
    leads = dist.get_rank() == 0
    looked_at = f"between {dist.get_world_size()} ranks over {arguments.backend}"
    dist.destroy_process_group()
    return _print(findings, arguments, looked_at) if leads else _code(findings, arguments)


def _print(findings: Sequence[Finding], arguments: argparse.Namespace, looked_at: str) -> int:
    if arguments.json:
        print(to_json([asdict(finding) for finding in findings]), flush=True)
    elif findings:
        print(table(["found", "host", "measured", "expected", "cure"], merged(findings), num_left=5), flush=True)
    else:
        print(f"nothing found {looked_at}", flush=True)
    return _code(findings, arguments)


def merged(findings: Sequence[Finding]) -> list[list[str]]:
    """A row for each cause: one that shows on several hosts or links is one row, and a slow host's links are its own.

    JSON has every finding.
    """
    slow = {each.host for each in findings if each.name == "slow link"}
    of_cause: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        if each.name != "rate" or not slow & {*each.host.split(" to ")}:
            of_cause.setdefault((each.name, each.cure), []).append(each)
    rows = []
    for (name, cure), (first, *others) in of_cause.items():
        host = f"{first.host} and {len(others)} more" if others else first.host
        rows.append([name, host, first.measured, first.expected, cure])
    return rows


def _code(findings: Sequence[Finding], arguments: argparse.Namespace) -> int:
    return _STRICT if findings and arguments.strict else 0
