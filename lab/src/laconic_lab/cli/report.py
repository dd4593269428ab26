"""laconic report: the page of a comparison or a plan, made again from its records."""

from __future__ import annotations

import argparse
from pathlib import Path

from laconic_lab.report import write_report


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `laconic report`."""
    parser = commands.add_parser(
        "report",
        help="write DIR/report.html from the records of a comparison, or from a plan",
        description="Write DIR/report.html from what `laconic compare` or `laconic plan` left there by --out DIR. "
        "The page holds everything it needs and works offline.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what was given to --out")
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    print(write_report(asked.folder), flush=True)
    return 0
