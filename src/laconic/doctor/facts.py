"""Facts that one process knows of its host."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic import __version__, kernels
from laconic.errors import KernelError
from laconic.transport import Interface, address_in_use, address_to_be_used, address_towards, interface_at, interfaces

_WORK_SIDE = 256
_WORK_S = 0.5
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # TCP's, in this network namespace


@dataclass(frozen=True)
class HostFacts:
    """One process and its host."""

    host: str
    machine: str  # equal for processes of one host, and for no others
    versions: Mapping[str, str]
    num_threads: int
    num_cores: int
    kernels: str  # why the fast ones do not run; empty where they do
    asked_interface: str  # GLOO_SOCKET_IFNAME
    interfaces: tuple[str, ...]
    used: Interface | None  # that the group uses, or would
    towards: Interface | None  # on the way to MASTER_ADDR, or on the default route
    work_s: float = 0.0  # of a fixed piece of work
    congestion_control: str = ""  # of TCP

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> HostFacts:
        """The facts of which `asdict` gave this."""
        ends = {name: Interface(**saved[name]) if saved[name] else None for name in ("used", "towards")}
        return cls(**{**saved, **ends, "interfaces": tuple(saved["interfaces"])})


def facts_here(work: Callable[[], object] | None = None) -> HostFacts:
    """This process and its host; after the first messages of the group, if there is one."""
    towards = interface_at(address_towards(os.environ.get("MASTER_ADDR", "")))
    used = interface_at(address_in_use() or address_to_be_used())
    if used is None or used.name == "lo":  # nobody else is there, or nobody else yet
        used = towards
    return HostFacts(
        host=platform.node(),
        machine=_machine(),
        versions={"laconic": __version__, "torch": torch.__version__, "Python": platform.python_version()},
        num_threads=torch.get_num_threads(),
        num_cores=num_cores(),
        kernels=_kernels_missing(),
        asked_interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        interfaces=tuple(interfaces()),
        used=used,
        towards=towards,
        work_s=_least_seconds(work or _work()),
        congestion_control=_congestion_control(),
    )


def num_cores() -> int:
    """The number that this process may use, by its affinity and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def _congestion_control() -> str:
    try:
        return _CONGESTION_CONTROL.read_text().strip()
    except OSError:  # not Linux
        return ""


def _machine() -> str:
    """The kernel since it was started, and the network in it that this process sees."""
    named = [platform.node()]
    with suppress(OSError):
        named.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        named.append(os.readlink("/proc/self/ns/net"))
    return " ".join(named)


def _kernels_missing() -> str:
    if os.environ.get("LACONIC_KERNELS") == "reference":
        return "LACONIC_KERNELS=reference asks for the slow ones"
    try:
        devices = ["cpu", *["cuda"] * torch.cuda.is_available()]
        return next((reason for device in devices if (reason := kernels.missing(device))), "")
    except KernelError as error:
        return str(error)


def _work() -> Callable[[], object]:
    """A product of matrices and a copy, some milliseconds on any processor."""
    matrix = torch.ones(_WORK_SIDE, _WORK_SIDE)
    room = torch.empty(64, _WORK_SIDE, _WORK_SIDE)
    return lambda: (matrix @ matrix, room.copy_(matrix.expand_as(room)))


def _least_seconds(work: Callable[[], object]) -> float:
    """The least of many: what else runs can only lengthen it."""
    work()
    end = time.perf_counter() + _WORK_S
    taken: list[float] = []
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
