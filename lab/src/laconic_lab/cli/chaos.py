"""laconic chaos and laconic soak: faults drawn from a seed, and whether what is promised holds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from laconic_lab.cli.lab import add_spec, spec_of
from laconic_lab.errors import TaskError
from laconic_lab.records import to_json

_BROKEN = 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `chaos` and `soak`."""
    chaos = commands.add_parser("chaos", help="let faults drawn from a seed befall workers, and check every promise")
    chaos.add_argument("--seed", type=int, default=0, metavar="S", help="of the first fault; the next has S + 1")
    chaos.add_argument("--faults", type=int, default=100, metavar="N", help="how many (default 100)")
    chaos.add_argument("--scheme", metavar="TEXT", help="this scheme alone, instead of some of every family")
    chaos.add_argument(
        "--on", choices=("virtual", "processes", "members"), help="these alone; workers of the first two unless given"
    )
    chaos.add_argument(
        "--timeout", type=float, default=6.0, metavar="S", help="seconds that a process waits for another (default 6)"
    )
    add_spec(chaos, "of a lab, one rank on each, so that links are cut and healed too")
    chaos.add_argument("--json", action="store_true", help="one JSON object, as the last line on stdout")
    chaos.set_defaults(run=run_chaos)

    soak = commands.add_parser("soak", help="train for long with random faults, and see whether anything grows")
    soak.add_argument("--minutes", type=float, default=60.0, metavar="M", help="how long (default 60)")
    soak.add_argument("--seed", type=int, default=0, metavar="S", help="of the faults")
    soak.add_argument("--json", action="store_true", help="one JSON object, as the last line on stdout")
    soak.set_defaults(run=run_soak)


def run_chaos(args: argparse.Namespace) -> int:
    """Run the faults; 1 where a promise was broken."""
    from laconic_lab.chaos.run import chaos  # torch and a process to fork from, which other commands do without
    from laconic_lab.network import Lab

    if args.faults < 1:
        raise TaskError(f"--faults is {args.faults}; give 1 or more")
    with Lab.create(spec_of(args)) if args.hosts is not None else nullcontext() as lab:
        outcome = chaos(
            args.seed, args.faults, on=args.on, scheme=args.scheme, lab=lab, timeout_s=args.timeout, say=_say
        )
    return _tell(outcome, args, f"{outcome['faults']} faults ({outcome['on_processes']} on processes)")


def run_soak(args: argparse.Namespace) -> int:
    """Soak; 1 where something grew or a promise was broken."""
    from laconic_lab.chaos.soak import soak

    if not args.minutes > 0:
        raise TaskError(f"--minutes is {args.minutes}; give a number above 0")
    outcome = soak(args.minutes, args.seed, _say)
    return _tell(outcome, args, f"{args.minutes:g} minutes, {outcome['pauses']} pauses, {outcome['faults']} faults")


def _tell(outcome: Mapping[str, Any], args: argparse.Namespace, what: str) -> int:
    broken = len(outcome["violations"])
    print(to_json(outcome) if args.json else f"{what}, {broken} violations, {outcome['seconds']:.0f} s", flush=True)
    return _BROKEN if broken else 0


def _say(text: str) -> None:
    print(f"laconic: {text}", file=sys.stderr, flush=True)
