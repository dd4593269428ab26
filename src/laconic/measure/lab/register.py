"""The register of labs: a file for each in /run/laconic, written before the lab is made and removed after it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

DIRECTORY = Path("/run/laconic")


@dataclass(frozen=True)
class Process:
    """A process, told by its start time from a later one with the same number."""

    pid: int
    started: int  # clock ticks after boot

    @classmethod
    def current(cls) -> Process:
        pid = os.getpid()
        return cls(pid, int(_stat(pid)[19]))

    @property
    def is_alive(self) -> bool:
        try:
            stat = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat[0] not in "ZX" and int(stat[19]) == self.started


@dataclass(frozen=True)
class Entry:
    """What is written down of a lab: enough to find it, use it and remove it."""

    id: str
    links: tuple[str, ...]
    owner: Process | None  # None: a lab that stands until it is taken down

    @property
    def path(self) -> Path:
        return DIRECTORY / f"{self.id}.json"

    def write(self) -> None:
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(self.path)  # whole or not at all, whenever this process is killed

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def entries() -> list[Entry]:
    """Every lab of this machine, of whatever process, oldest first."""
    found = []
    for path in DIRECTORY.glob("*.json"):
        try:
            found.append((path.stat().st_mtime, json.loads(path.read_text())))
        except FileNotFoundError:  # its owner has just closed it
            continue
    found.sort(key=lambda item: item[0])
    return [
        Entry(told["id"], tuple(told["links"]), Process(**told["owner"]) if told["owner"] else None)
        for _, told in found
    ]


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from field 3, the state, on; the command before it may hold spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
