"""laconic demo: the point in two minutes, on links that are slow if a lab can be made."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from laconic_lab.cli import compare
from laconic_lab.errors import LabError
from laconic_lab.network import netlink

_LAB = ["--hosts", "2", "--link", "10mbit"]  # a core for each of them, on a machine of two
_JOB = [
    "--steps",
    "50",
    "--batch",
    "24",
    "--momentum",
    "0.8",
    "--eval-every",
    "5",
    "--target",
    "0.7",
    "--max-seconds",
    "30",
]
_SCHEMES = ["--scheme", "bf16", "--scheme", "topk:rho=0.01"]


def add_parser(
    commands: argparse._SubParsersAction[Any],
    parse: Callable[[Sequence[str]], argparse.Namespace],
) -> None:
    """Add `laconic demo`; `parse` reads the words of the command that it stands for."""
    parser = commands.add_parser("demo", help="show the point in two minutes: bf16 and topk on slow links")
    parser.set_defaults(run=lambda _: run(parse))


def run(parse: Callable[[Sequence[str]], argparse.Namespace]) -> int:
    """Compare in a lab; where none can be made, without times."""
    where = _LAB
    try:
        netlink.require()
    except LabError as error:
        print(f"laconic: {error}", file=sys.stderr)
        print("laconic: without a slow link there is no speed-up to show; bytes and accuracy alone", file=sys.stderr)
        where = ["--workers", "2"]
    words = ["compare", *where, *_SCHEMES, *_JOB, "--out", tempfile.mkdtemp(prefix="laconic-demo-")]
    print(f"laconic: this is `laconic {shlex.join(words)}`", file=sys.stderr, flush=True)
    return compare.run(parse(words), is_timed=where is _LAB)
