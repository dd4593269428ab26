"""One host of a lab: a network namespace with a name, an address and a link."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO

from laconic_lab.errors import LabError
from laconic_lab.network import enter, netlink
from laconic_lab.network.spec import Link

INTERFACE = "eth0"
_KILL_TIMEOUT_S = 10


@dataclass(frozen=True)
class Counters:
    """Bytes and packets that a host's link carried, headers included, as its queues counted them."""

    bytes_out: int
    bytes_in: int
    packets_out: int
    packets_in: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(frozen=True)
class Host:
    """A host as commands see it: `popen` runs one there."""

    index: int
    namespace: str
    address: str
    link: Link
    switch: str  # the namespace of the bridge
    names: Path  # the lab's hosts file
    variables: Mapping[str, str]  # what every command on this host finds in its environment

    @property
    def name(self) -> str:
        """The host's name inside the lab, and that of its port on the switch."""
        return f"host{self.index}"

    @property
    def entering(self) -> str:
        """The command of util-linux that enters this host."""
        user = self.namespace.partition("/fd/")[0] + "/ns/user"
        owned = f" --user={user} --preserve-credentials" * (not os.path.samefile(user, "/proc/self/ns/user"))
        return f"nsenter{owned} --net={self.namespace}"

    @property
    def is_cut(self) -> bool:
        """Whether the link is down."""
        return not netlink.is_up(self.switch, self.name)

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start `argv` on this host, `env` added to the environment; its pid leads a session of its own."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", enter.__file__, "run", self.namespace, self.name, str(self.names), *argv],
            env={**os.environ, **self.variables, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        while process.poll() is None and not netlink.holds(self.namespace, process.pid):
            time.sleep(0.001)  # for 40 ms; from then on `kill` finds it
        return process

    def counters(self) -> Counters:
        """Bytes and packets since the lab was made.

        Queues count what a cable would carry; the counters of the interface see a 64 kB packet of segmentation
        offload as one, with one header instead of 45 (4 % less).
        """
        out = netlink.queue_state(self.namespace, INTERFACE)
        back = netlink.queue_state(self.switch, self.name)
        return Counters(out.bytes, back.bytes, out.packets, back.packets)

    def kill(self, variable: str = "") -> None:
        """End every process on this host at once, or those that carry `variable` (NAME=value) in their environment."""
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while pids := [pid for pid in netlink.pids(self.namespace) if variable.encode() in _environment(pid)]:
            if time.monotonic() > deadline:
                raise LabError(f"processes {pids} on {self.name} do not end; look at them with ps, then try again")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended
        return b""
