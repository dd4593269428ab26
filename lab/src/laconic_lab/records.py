"""Measured facts on disk: one JSON object per line, in DIR/records.jsonl."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laconic.cli import to_json
from laconic_lab.errors import TaskError

RECORDS = "records.jsonl"
WARM_UP_STEPS = 5  # of a run, left out of its step times: first touches of memory, DDP's rebuilding of buckets


class Recorder:
    """Appends facts to DIR/records.jsonl as they are measured; without a folder it drops them."""

    def __init__(self, folder: Path | None, *, keeps_old: bool = False) -> None:
        self._file = None
        if folder is not None:
            make_writable(folder)
            self._file = (folder / RECORDS).open("a" if keeps_old else "w", encoding="utf-8", buffering=1)

    def write(self, kind: str, **fact: Any) -> None:
        if self._file is not None:
            self._file.write(to_json({"kind": kind, **fact}) + "\n")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def make_writable(folder: Path) -> None:
    """Make the folder if it is not there, and try to write in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TaskError(
            f"nothing can be written to {folder} ({error.strerror}); give --out a folder that can be written"
        ) from None


def forget_after(folder: Path, step: int) -> None:
    """Drop what a run that broke off wrote after its last checkpoint, and a result, which is no longer true."""
    kept = [fact for fact in read(folder) if fact.get("step", 0) <= step and fact["kind"] != "result"]
    (folder / RECORDS).write_text("".join(to_json(fact) + "\n" for fact in kept), encoding="utf-8")


def read(folder: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The facts in a folder, of one kind or all."""
    path = folder / RECORDS
    if not path.exists():
        raise TaskError(f"{folder} has no {RECORDS}; give a folder that `laconic train --out` wrote")
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            fact = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                return  # a run that was killed while it wrote
            raise TaskError(f"line {number} of {path} is not JSON; run it again") from None
        if kind is None or fact["kind"] == kind:
            yield fact
