"""The register of labs: a file for each, of this user, written before the lab is made and removed after it."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from laconic_lab.errors import LabError
from laconic_lab.network import netlink


def directory() -> Path:
    """Where this user's labs are written down; made where it is not there."""
    path = Path("/run" if netlink.has_root() else "/tmp") / f"laconic-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.geteuid():
        raise LabError(f"{path} is another user's; remove it, so that your labs can be written down there")
    return path


@dataclass(frozen=True)
class Process:
    """A process, told by its start time from a later one with the same number."""

    pid: int
    started: int  # clock ticks after boot

    @classmethod
    def numbered(cls, pid: int) -> Process:
        return cls(pid, int(_stat(pid)[19]))

    @property
    def is_alive(self) -> bool:
        try:
            stat = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat[0] not in "ZX" and int(stat[19]) == self.started

    def kill(self) -> None:
        """End it, unless it has."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Entry:
    """What is written down of a lab: enough to find it, use it and remove it."""

    id: str
    links: tuple[str, ...]
    owner: Process | None  # None: a lab that stands until it is taken down
    holder: Process  # which keeps its namespaces

    @property
    def path(self) -> Path:
        return directory() / f"{self.id}.json"

    def write(self) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(self.path)  # whole or not at all, whenever this process is killed

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def entries() -> list[Entry]:
    """Every lab of this user, of whatever process, oldest first."""
    found = []
    for path in directory().glob("*.json"):
        try:
            found.append((path.stat().st_mtime, json.loads(path.read_text())))
        except FileNotFoundError:  # its owner has just closed it
            continue
    found.sort(key=lambda item: item[0])
    return [
        Entry(
            told["id"],
            tuple(told["links"]),
            Process(**told["owner"]) if told["owner"] else None,
            Process(**told["holder"]),
        )
        for _, told in found
    ]


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from field 3, the state, on; the command before it may hold spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
