"""Checkpoints: DIR/checkpoint/step-N/rank-R.pt, and DIR/checkpoint/latest names the newest that is whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from laconic.errors import TaskError

_FOLDER, _LATEST = "checkpoint", "latest"


def save_checkpoint(folder: Path, step: int, rank: int, state: dict[str, Any], barrier: Callable[[], object]) -> None:
    """Write this rank's part; all ranks call it, and only when all parts are there does the checkpoint count."""
    home = folder / _FOLDER
    target = home / f"step-{step}"
    if rank == 0:
        shutil.rmtree(target, ignore_errors=True)  # an earlier run may have had more ranks
        target.mkdir(parents=True)
    barrier()
    torch.save(state, target / f"rank-{rank}.pt")
    barrier()
    if rank == 0:
        fresh = home / "latest.new"
        fresh.write_text(target.name)
        fresh.replace(home / _LATEST)
        for old in home.glob("step-*"):
            if old != target:
                shutil.rmtree(old)


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
