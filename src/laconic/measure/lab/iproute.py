"""The commands ip and tc: the only hands the lab has."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from laconic.errors import LabError

_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # bits of CapEff: links and queues; namespaces


def require() -> None:
    """Raise with the cure unless this machine and this user can have a lab."""
    if platform.system() != "Linux":
        raise LabError(f"a lab needs Linux network namespaces, and this is {platform.system()}: use a Linux machine")
    if not {_CAP_NET_ADMIN, _CAP_SYS_ADMIN} <= _capabilities():
        raise LabError(
            "a lab needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN): run it with sudo, a container with --privileged"
        )
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            raise LabError(f"a lab needs the command {tool}: install {package}")


def ip(*words: str) -> str:
    """Carry out one ip command; what it says."""
    return _call(["ip", *words])


def ip_batch(namespace: str, lines: Iterable[str]) -> None:
    """Carry out one ip command per line inside `namespace`."""
    _call(["ip", "-n", namespace, "-batch", "-"], "\n".join(lines))


def tc_batch(namespace: str, lines: Iterable[str]) -> None:
    """Carry out one tc command per line inside `namespace`."""
    _call(["tc", "-n", namespace, "-batch", "-"], "\n".join(lines))


def is_up(namespace: str, device: str) -> bool:
    """Whether `device` is switched on."""
    (shown,) = json.loads(_call(["ip", "-n", namespace, "-j", "link", "show", "dev", device]))
    return "UP" in shown["flags"]


def queue_counts(namespace: str, device: str) -> dict[str, Any]:
    """What the root queue of `device` has sent: bytes, packets, drops."""
    shown = json.loads(_call(["tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device, "root"]))
    return dict(shown[0])


def pids(namespace: str) -> list[int]:
    """The processes inside `namespace`; none where there is no such namespace."""
    try:
        return [int(pid) for pid in ip("netns", "pids", namespace).split()]
    except LabError:
        if namespace in namespaces():
            raise
        return []


def delete(namespace: str) -> None:
    """Remove `namespace`, which another process that clears the same lab may have done already."""
    try:
        ip("netns", "delete", namespace)
    except LabError:
        if namespace in namespaces():
            raise


def namespaces() -> set[str]:
    """The names of all network namespaces of this machine, whoever made them."""
    directory = Path("/run/netns")
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def _call(words: list[str], text: str | None = None) -> str:
    # In a process group of its own, so that Ctrl-C in the terminal cannot break off a clean-up half way.
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, process_group=0)
    if done.returncode != 0:
        reason = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
        raise LabError(f"`{' '.join(words)}` failed: {reason}")
    return done.stdout


def _capabilities() -> set[int]:
    status = Path("/proc/self/status").read_text()
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return {bit for bit in range(mask.bit_length()) if mask >> bit & 1}
