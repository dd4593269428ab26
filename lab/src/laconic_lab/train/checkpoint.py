"""Checkpoints: DIR/checkpoint/step-N holds rank-R.pt of each rank and a manifest, written last, that vouches for them.

The two newest are kept. The next is written beside them as step-N.new, brought to the disk (fsync) and renamed when all
of it is there, so a kill or a power cut at any moment leaves those before it whole.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import laconic
from laconic_lab.errors import LaconicError, TaskError
from laconic_lab.train.worker_group import WorkerGroup

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FOLDER = "checkpoint"
_MANIFEST = "manifest.json"
FORMAT = 2
_NAME = re.compile(r"step-(\d+)")
_PART = re.compile(r"rank-\d+\.pt")
_CHECKSUM = struct.Struct("<8I")  # as numbers that workers can tell each other
_ABOUT = {"step": int, "files": dict, "scheme": str, "num_workers": int, "model": dict}
_AFRESH = "leave --resume out to start afresh"


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole, with what its manifest tells."""

    folder: Path
    step: int
    about: Mapping[str, Any]
    remarks: Sequence[str]  # newer ones that are damaged, files that do not belong here

    def load(self, *, mapped: bool = False) -> list[dict[str, Any]]:
        """Every rank's state; `mapped` leaves the tensors on disk until they are read."""
        parts = [self.folder / name for name in self.about["files"]]
        return [torch.load(part, map_location="cpu", weights_only=True, mmap=mapped) for part in parts]


def save_checkpoint(
    folder: Path, step: int, rank: int, state: Mapping[str, Any], group: WorkerGroup, about: dict[str, Any]
) -> tuple[bool, str]:
    """Write this worker's part; all of them call it, and only when all parts are there does the checkpoint count.

    Where one dies meanwhile or cannot write it does not, and those before are kept. `about` goes into the manifest.
    Returns whether all that live could write, the same on each, and why this one could not, in a line.
    """
    home = folder / _FOLDER
    fresh = home / f"step-{step}.new"
    num_living = group.num_living
    if group.place == 0:
        shutil.rmtree(fresh, ignore_errors=True)  # an earlier run may have had more ranks
    group.gather([rank])  # till the folder is clear
    fact: dict[str, Any] = {}
    failure = ""
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        fact = _write(fresh / _part(rank), state)
    except OSError as error:
        failure = _why(step, home, error)
    try:
        rows = group.gather(_row(rank, fact))  # till all have written
    except LaconicError:  # they may have gone on without this one
        if [path.name for path in fresh.glob("*")] == [_part(rank)]:  # with parts of others it may count
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    if group.place == 0:  # which it may be since the first has died
        try:
            if len(rows) == num_living and all(row[1] for row in rows):
                files = dict(_fact(row) for row in sorted(rows))
                for name in files:
                    (fresh / name).stat()  # not there where hosts do not share the folder
                manifest = {"format": FORMAT, "laconic": laconic.__version__, "step": step, "files": files}
                _write_manifest(fresh, manifest | about)
                _remove(home / f"step-{step}")
                fresh.rename(home / f"step-{step}")
                _sync(home)
                _keep_two(home, step)
        except OSError as error:
            failure = _why(step, home, error)
    rows = group.gather([float(bool(failure))])
    if group.place == 0:
        shutil.rmtree(fresh, ignore_errors=True)  # of one that does not count
    return not any(row[0] for row in rows), failure


def forget_after(folder: Path, step: int) -> None:
    """Let nobody go on from what a folder has of later steps; it is removed with the next that is written."""
    for later, old in _generations(folder / _FOLDER):
        if later > step:
            aside = old.with_name(f"{old.name}.old")
            _remove(aside)
            old.rename(aside)


def find_checkpoint(folder: Path, group: WorkerGroup | None = None) -> Checkpoint:
    """The newest whole checkpoint in a folder; every byte of it has been looked at.

    Among a group that is a call which all workers make, and each looks at its part of the files.
    """
    remarks = []
    for step, checkpoint in _generations(folder / _FOLDER):
        about = _read_manifest(checkpoint)
        damage = f"{checkpoint / _MANIFEST} is damaged" if about is None else _damage(checkpoint, about, group)
        if about is None or damage:
            remarks.append(damage)
            continue
        remarks = [f"{remark}; going on from step {step}" for remark in remarks]
        strays = sorted({path.name for path in checkpoint.iterdir()} - {_MANIFEST, *about["files"]})
        remarks += [f"{checkpoint / stray} is not of this checkpoint and is not read; remove it" for stray in strays]
        return Checkpoint(checkpoint, step, about, remarks)
    if remarks:
        raise TaskError(f"{remarks[0]}; put a copy of it there, or {_AFRESH}")
    raise TaskError(f"{folder} holds no checkpoint that laconic wrote; {_AFRESH}")


def _generations(home: Path) -> list[tuple[int, Path]]:
    """(step, folder) of what has a manifest, the newest first: anything else here is not ours."""
    generations = [(_NAME.fullmatch(path.parent.name), path.parent) for path in home.glob(f"*/{_MANIFEST}")]
    return sorted(((int(name[1]), path) for name, path in generations if name), reverse=True)


def _damage(checkpoint: Path, about: Mapping[str, Any], group: WorkerGroup | None) -> str:
    """The first damage of a checkpoint's files, in words; nothing where they are as they were written."""
    if about.get("format") != FORMAT:
        return f"{checkpoint} is of laconic {about.get('laconic')}, whose format this version does not read"
    files = list(about["files"].items())
    first, num_sharing = len(files), 0
    rows: list[list[float]] = []
    while not rows or len(rows) < num_sharing:  # again where one died meanwhile, with whose files nobody is done
        place, num_sharing = (group.place, group.num_living) if group else (0, 1)
        own = range(place, len(files), num_sharing)
        damaged = (number for number in own if not _is_whole(checkpoint / files[number][0], files[number][1]))
        row = [about["step"], next(damaged, len(files))]
        rows = group.gather(row) if group else [row]
        if len(steps := {int(step) for step, _ in rows}) > 1:
            raise other_steps(checkpoint.parent.parent, steps)
        first = min(first, *(int(number) for _, number in rows))
    if first == len(files):
        return ""
    part = checkpoint / files[first][0]
    return f"{part} is {'damaged' if part.is_file() else 'missing'}"


def _is_whole(part: Path, fact: Mapping[str, Any]) -> bool:
    if not part.is_file():
        return False
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == str(fact["sha256"])


def other_steps(folder: Path, steps: Collection[int]) -> TaskError:
    """The error where not all workers find the same step."""
    return TaskError(f"workers find other steps in {folder}: {sorted(steps)}; give an --out that all hosts share")


def _keep_two(home: Path, step: int) -> None:
    """Remove all but this one and the one before it: a run that went back has no use for what came after."""
    before = [older for older, _ in _generations(home) if older < step]
    kept = {f"step-{number}" for number in (step, *before[:1])}
    for path in home.glob("step-*"):
        if path.suffix == ".new":
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in kept:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Remove what has the names that we write, and nothing else, whatever a manifest names."""
    if not (checkpoint / _MANIFEST).is_file():
        return
    for path in [path for path in checkpoint.iterdir() if path.name == _MANIFEST or _PART.fullmatch(path.name)]:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # there are strays in it
        checkpoint.rmdir()


class _Hashed(io.BufferedWriter):
    """A file that knows the checksum of what was given to it, whatever becomes of that on the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None  # torch.save says less of it

    def write(self, data: Buffer) -> int:
        self.sha256.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _write(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Save to the disk itself; the length and checksum of what should be there."""
    with _Hashed(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError:
            if file.error is None:
                raise
            raise file.error from None
        num_bytes = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": num_bytes, "sha256": file.sha256.hexdigest()}


def _write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    text = json.dumps(about)
    with (folder / _MANIFEST).open("w") as file:
        file.write(json.dumps({"sha256": _text_hash(text), "about": about}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The contents of a manifest; None if it is missing, or not as this code writes one."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        about: dict[str, Any] = manifest["about"]
        is_signed = manifest["sha256"] == _text_hash(json.dumps(about))
        return about if is_signed and (about["format"] != FORMAT or _is_sound(about)) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_sound(about: Mapping[str, Any]) -> bool:
    """Whether everything in it has the type that it is written with, and files have the names that we give."""
    facts = about["files"]
    return (
        {name: type(about[name]) for name in _ABOUT} == _ABOUT
        and about["step"] >= 0
        and about["num_workers"] > 0
        and all(type(layout) is str for layout in about["model"].values())
        and bool(facts)
        and all(_PART.fullmatch(name) for name in facts)
        and all(type(fact["sha256"]) is str and type(fact["bytes"]) is int for fact in facts.values())
        and all(fact["bytes"] >= 0 for fact in facts.values())
    )


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _why(step: int, home: Path, error: OSError) -> str:
    return (
        f"step {step} is not saved: {error.strerror} ({error.filename or home}); give --out room enough, in a folder "
        "of its own that all hosts share; what was saved before is kept"
    )


def _part(rank: int) -> str:
    return f"rank-{rank}.pt"


def _row(rank: int, fact: Mapping[str, Any]) -> list[float]:
    """A worker's numbers of its file: the length is 0 where it could not be written."""
    return [rank, fact.get("bytes", 0), *_CHECKSUM.unpack(bytes.fromhex(fact.get("sha256", "00" * _CHECKSUM.size)))]


def _fact(row: Sequence[float]) -> tuple[str, dict[str, Any]]:
    """The inverse."""
    rank, num_bytes, *words = map(int, row)
    return _part(rank), {"bytes": num_bytes, "sha256": _CHECKSUM.pack(*words).hex()}
