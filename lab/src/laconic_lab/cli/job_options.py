"""A job's fields as command-line options, and what was run as a fact for the records."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from laconic_lab.network import LabSpec
from laconic_lab.train import Job


def add_job_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """One option for each field of Job; one that is not given is not in the namespace, and Job knows its default."""
    hints = get_type_hints(Job)
    for option in fields(Job):
        if option.name in without:
            continue
        name = f"--{option.name.replace('_', '-')}"
        meaning = str(option.metadata["meaning"]).replace("%", "%%")
        if hints[option.name] is bool:
            parser.add_argument(name, action="store_true", help=meaning)
        else:
            kind = next(t for t in (*get_args(hints[option.name]), hints[option.name]) if t is not type(None))
            shown = f"{meaning} (default {option.default})" if option.default is not None else meaning
            parser.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=_metavar(kind), help=shown)


def job_of(asked: argparse.Namespace, **instead: Any) -> Job:
    """The job that was asked for, with some fields replaced."""
    return Job(**{**given_options(asked), **instead})


def given_options(asked: argparse.Namespace) -> dict[str, Any]:
    """What was said of a job, by the name of its field."""
    return {option.name: getattr(asked, option.name) for option in fields(Job) if hasattr(asked, option.name)}


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
        "rounds": rounds,
        "target": target,
        "measure": measure,
    }


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "NAME")
