"""A job's fields as command-line options."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from laconic.measure.train import Job


def add_job_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """One option for each field of Job; one that is not given is not in the namespace, and Job knows its default."""
    hints = get_type_hints(Job)
    for option in fields(Job):
        if option.name in without:
            continue
        name, meaning = f"--{option.name.replace('_', '-')}", str(option.metadata["meaning"]).replace("%", "%%")
        if hints[option.name] is bool:
            parser.add_argument(name, action="store_true", help=meaning)
        else:
            kind = next(t for t in (*get_args(hints[option.name]), hints[option.name]) if t is not type(None))
            shown = f"{meaning} (default {option.default})" if option.default is not None else meaning
            parser.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=_metavar(kind), help=shown)


def job_of(asked: argparse.Namespace, **instead: Any) -> Job:
    """The job that was asked for, with some fields replaced."""
    given = {option.name: getattr(asked, option.name) for option in fields(Job) if hasattr(asked, option.name)}
    return Job(**{**given, **instead})


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "NAME")
