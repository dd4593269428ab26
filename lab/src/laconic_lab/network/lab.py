"""A lab: hosts as network namespaces, each on a shaped link to one switch, and the register of all labs of a user."""

from __future__ import annotations

import json
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from laconic_lab.errors import LabError
from laconic_lab.network import enter, netlink
from laconic_lab.network.host import INTERFACE, Host
from laconic_lab.network.spec import LabSpec, Link

_BRIDGE = "bridge"
_MASTER_PORT = "29500"  # torchrun's own default; always free on a host that is new


class Lab:
    """Hosts that exist now; leaving the `with` block removes them and every process on them."""

    def __init__(self, entry: Entry) -> None:
        self.id = entry.id
        self.owner = entry.owner
        self._entry = entry
        self._names = directory() / f"{self.id}.hosts"
        # The switch has a namespace too: nothing of a lab is seen from the machine's own network, or from another
        # lab's, so that all labs may use the same addresses.
        self.wires = enter.namespace(entry.holder.pid, len(entry.links))  # where a relay stands between host and switch
        self.switch = enter.namespace(entry.holder.pid, len(entry.links) + 1)
        self.hosts = tuple(self._host(index) for index in range(len(entry.links)))

    @classmethod
    def create(cls, spec: LabSpec, *, standing: bool = False) -> Lab:
        """Make the hosts, after removing labs whose process is gone; a standing lab outlives this process."""
        netlink.require()
        remove_abandoned()
        owner = None if standing else Process.numbered(os.getpid())
        made: list[Lab] = []

        def note(holder: int) -> None:
            links = tuple(str(link) for link in spec.links)
            entry = Entry(secrets.token_hex(3), links, spec.slowdowns, owner, Process.numbered(holder))
            entry.write()
            made.append(cls(entry))

        netlink.hold(spec.hosts + 2, note)  # in the last of which, the switch's, the holder stays
        (lab,) = made
        try:
            lab._make()
        except BaseException:
            lab.close()
            raise
        return lab

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_standing(self) -> bool:
        return self.owner is None

    @property
    def is_abandoned(self) -> bool:
        """Whether the process that made the lab, or the one that holds it, has ended without removing it."""
        return not all(process.is_alive for process in (self.owner, self._entry.holder) if process is not None)

    def host(self, index: int) -> Host:
        """Host `index`, or an error that says which there are."""
        if not 0 <= index < len(self.hosts):
            raise LabError(f"there is no host {index}; the hosts are 0 to {len(self.hosts) - 1}")
        return self.hosts[index]

    def pids(self) -> list[int]:
        """The processes on its hosts."""
        return [pid for host in self.hosts for pid in netlink.pids(host.namespace)]

    def cut(self, index: int) -> None:
        """Pull the host's cable: its packets are lost both ways until `heal`."""
        netlink.switch(self.switch, self.host(index).name, "down")

    def heal(self, index: int) -> None:
        """Put the host's cable back."""
        netlink.switch(self.switch, self.host(index).name, "up")

    def set_rate(self, bits_per_s: int) -> None:
        """Give all hosts links of another rate, while processes on them run."""
        for host in self.hosts:
            self._shape(host, Link(bits_per_s))

    def close(self) -> None:
        """End all processes on the hosts and remove what `create` made; a second call does nothing."""
        for host in self.hosts:
            host.kill()
        self._entry.holder.kill()
        self._names.unlink(missing_ok=True)
        self._entry.remove()

    def _host(self, index: int) -> Host:
        first = "10.77.0.1"
        address = f"10.77.0.{index + 1}"
        variables = {
            "LACONIC_HOST": str(index),
            "LACONIC_HOSTS": str(len(self._entry.links)),
            "LACONIC_SLOWDOWN": f"{self._entry.slowdowns[index]:g}",
            "MASTER_ADDR": first,
            "MASTER_PORT": _MASTER_PORT,
            # torchrun takes the value of an option that is not given from PET_<OPTION>.
            "PET_NNODES": str(len(self._entry.links)),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": first,
            "PET_MASTER_PORT": _MASTER_PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            # NCCL would see one machine in all hosts and pass the links by, through shared memory.
            "NCCL_HOSTID": f"laconic-{self.id}-{index}",
        }
        link = Link.parse(self._entry.links[index])
        namespace = enter.namespace(self._entry.holder.pid, index)
        return Host(index, namespace, address, link, self.switch, self._names, variables)

    def _make(self) -> None:
        # TCPStore looks its peers up by the IPv6 form of their address.
        names = [f"{form}{host.address} {host.name}" for host in self.hosts for form in ("", "::ffff:")]
        self._names.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *names, ""]))
        netlink.add_bridge(self.switch, _BRIDGE)
        for host in self.hosts:
            self._plug_in(host)
        rough = {(host.name, f"port{host.index}"): host.link for host in self.hosts if not host.link.is_plain}
        if rough:
            netlink.start_relay(self.wires, self._entry.holder.pid, rough)

    def _plug_in(self, host: Host) -> None:
        if host.link.is_plain:
            netlink.add_cable(self.switch, host.name, host.namespace, INTERFACE, _BRIDGE)
        else:
            # To the relay: both ends lead out of the namespace, where a packet stops counting against its socket.
            netlink.add_cable(self.wires, host.name, host.namespace, INTERFACE)
            netlink.add_cable(self.switch, host.name, self.wires, f"port{host.index}", _BRIDGE)
            netlink.switch(self.wires, f"port{host.index}", "up")
        netlink.add_address(host.namespace, INTERFACE, host.address)
        netlink.switch(host.namespace, "lo", "up")
        self._shape(host, host.link)

    def _shape(self, host: Host, link: Link) -> None:
        # A queue shapes what leaves: the host's end is its way out, the switch's end its way in.
        netlink.add_queue(host.namespace, INTERFACE, link.queue)
        netlink.add_queue(self.switch, host.name, link.queue)
        if link.max_segments is not None:
            netlink.limit_segments(host.namespace, INTERFACE, link.max_segments)


def labs() -> list[Lab]:
    """Every lab of this user, abandoned ones too."""
    netlink.require()
    return [Lab(entry) for entry in entries()]


def remove_abandoned() -> list[str]:
    """Remove the labs whose process has ended (kill -9), and nothing else; their ids."""
    gone = [lab for lab in labs() if lab.is_abandoned]
    for lab in gone:
        lab.close()
    return [lab.id for lab in gone]


def directory() -> Path:
    """The folder of this user's register; made where it is missing."""
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
        return cls(pid, int(stat_of(pid)[19]))

    @property
    def is_alive(self) -> bool:
        try:
            stat = stat_of(self.pid)
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
    """A lab's entry in the register: enough to find it, use it and remove it."""

    id: str
    links: tuple[str, ...]
    slowdowns: tuple[float, ...]
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
    dated = []
    for path in directory().glob("*.json"):
        try:
            dated.append((path.stat().st_mtime, json.loads(path.read_text())))
        except FileNotFoundError:  # its owner has just closed it
            continue
    dated.sort(key=lambda item: item[0])
    return [
        Entry(
            entry["id"],
            tuple(entry["links"]),
            tuple(entry.get("slowdowns", [1.0] * len(entry["links"]))),  # an earlier release has none
            Process(**entry["owner"]) if entry["owner"] else None,
            Process(**entry["holder"]),
        )
        for _, entry in dated
    ]


def stat_of(pid: int) -> list[str]:
    """/proc/PID/stat from field 3, the state, on; the command before it may hold spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
