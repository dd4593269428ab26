"""Checkpoints: DIR/checkpoint/step-N/rank-R.pt, and DIR/checkpoint/latest names the newest that is whole."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from laconic.errors import TaskError
from laconic.measure.train.worker_group import WorkerGroup

_FOLDER = "checkpoint"
_LATEST = "latest"


def save_checkpoint(folder: Path, step: int, rank: int, state: dict[str, Any], group: WorkerGroup) -> None:
    """Write this worker's part; all of them call it, and only when all parts are there does the checkpoint count.

    Where one dies meanwhile it does not, and the one before is kept.
    """
    home = folder / _FOLDER
    target = home / f"step-{step}"
    leads = group.place == 0
    num_living = group.num_living
    if leads:
        shutil.rmtree(target, ignore_errors=True)  # an earlier run may have had more ranks
    group.total(torch.zeros(1))  # till the folder is clear
    target.mkdir(parents=True, exist_ok=True)
    torch.save(state, target / f"rank-{rank}.pt")
    group.total(torch.zeros(1))  # till all have written
    if leads and group.num_living == num_living:
        fresh = home / "latest.new"
        fresh.write_text(target.name)
        fresh.replace(home / _LATEST)
        for old in home.glob("step-*"):
            if old != target:
                shutil.rmtree(old)


def forget_checkpoint(folder: Path) -> None:
    """Let nobody go on from what an earlier run left in a folder."""
    (folder / _FOLDER / _LATEST).unlink(missing_ok=True)


def find_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint in a folder."""
    latest = folder / _FOLDER / _LATEST
    if not latest.is_file():
        raise TaskError(f"{folder} holds no checkpoint; leave --resume out to start afresh")
    name = latest.read_text(errors="replace").strip()
    if not re.fullmatch(r"step-[0-9]+", name):
        raise TaskError(f"{latest} names no checkpoint; leave --resume out to start afresh")
    return latest.parent / name


def load_checkpoint(folder: Path, *, mapped: bool = False) -> tuple[int, list[dict[str, Any]]]:
    """(steps done, every rank's state); `mapped` leaves the tensors on disk until they are read."""
    home = find_checkpoint(folder)
    parts = sorted(home.glob("rank-*.pt"), key=lambda path: int(path.stem.removeprefix("rank-")))
    try:
        states = [torch.load(part, map_location="cpu", weights_only=True, mmap=mapped) for part in parts]
    except Exception as error:  # torch.load fails in many ways on a file that was cut short
        raise TaskError(
            f"a checkpoint in {home} cannot be read ({type(error).__name__}); leave --resume out to start afresh"
        ) from None
    if not states:
        raise TaskError(f"{home} holds no checkpoint files; leave --resume out to start afresh")
    return int(home.name.removeprefix("step-")), states
