"""Network namespaces, links and queues, by the kernel's own calls and messages: the only hands the lab has."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from laconic.errors import LabError
from laconic.measure.lab.enter import CLONE_NEWNET, MS_BIND, NAMESPACES, call, join, mount

T = TypeVar("T")
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # bits of CapEff: links and queues; namespaces
_MNT_DETACH = 2
_IFF_UP = 1
# No IPv6 address, and so none of its neighbour talk: an idle link counts 0 bytes.
_NO_IPV6_ADDRESS = {"attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})]}


@dataclass(frozen=True)
class QueueState:
    """The root queue of a device: its rate, None where it does not shape, and what it has sent."""

    bytes_per_s: int | None
    bytes: int
    packets: int


def require() -> None:
    """Raise with the cure unless this machine and this user can have a lab."""
    if platform.system() != "Linux":
        raise LabError(f"a lab needs Linux network namespaces, and this is {platform.system()}: use a Linux machine")
    if not {_CAP_NET_ADMIN, _CAP_SYS_ADMIN} <= _capabilities():
        raise LabError(
            "a lab needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN): run it with sudo, a container with --privileged"
        )
    try:
        import pyroute2  # noqa: F401
    except ModuleNotFoundError:
        raise LabError("a lab needs pyroute2: pip install 'laconic[lab]', or pyroute2 alone") from None


def create(namespace: str) -> None:
    """Make a network namespace, with nothing in it but lo."""
    path = Path(NAMESPACES) / namespace

    def make() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        call("unshare", CLONE_NEWNET)
        mount("/proc/thread-self/ns/net", str(path), "none", MS_BIND)

    try:
        _in_a_thread(make)
    except OSError as error:
        raise LabError(f"namespace {namespace} could not be made: {error}") from None


def delete(namespace: str) -> None:
    """Remove `namespace`, which another process that clears the same lab may have done already."""
    path = f"{NAMESPACES}/{namespace}"
    with suppress(OSError):  # not mounted: half made, or half removed
        call("umount2", os.fsencode(path), _MNT_DETACH)
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise LabError(f"namespace {namespace} could not be removed: {error}") from None


def namespaces() -> set[str]:
    """The names of all network namespaces of this machine, whoever made them."""
    directory = Path(NAMESPACES)
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def pids(namespace: str) -> list[int]:
    """The processes inside `namespace`; none where there is no such namespace."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and holds(namespace, int(entry))]


def holds(namespace: str, pid: int) -> bool:
    """Whether a process is inside `namespace`."""
    try:
        return os.path.samefile(f"/proc/{pid}/ns/net", f"{NAMESPACES}/{namespace}")
    except OSError:  # one of the two has just ended
        return False


def add_bridge(namespace: str, name: str) -> None:
    """Add a bridge, switched on."""

    def add(kernel: Any) -> None:
        kernel.link("add", ifname=name, kind="bridge", br_mcast_snooping=0)
        _switch_on(kernel, name)

    _ask(namespace, f"add the bridge {name}", add)


def add_cable(switch: str, bridge: str, port: str, namespace: str, device: str) -> None:
    """Connect a new `device` of `namespace` with a new `port`, switched on, of the bridge in `switch`."""

    def add(kernel: Any) -> None:
        kernel.link("add", ifname=port, kind="veth", peer={"ifname": device, "net_ns_fd": f"{NAMESPACES}/{namespace}"})
        kernel.link("set", index=_index(kernel, port), master=_index(kernel, bridge))
        _switch_on(kernel, port)

    _ask(switch, f"add the cable of {port}", add)


def add_address(namespace: str, device: str, address: str) -> None:
    """Give `device` an address, of a network of 256, and switch it on."""

    def add(kernel: Any) -> None:
        kernel.addr("add", index=_index(kernel, device), address=address, prefixlen=24)
        _switch_on(kernel, device)

    _ask(namespace, f"add the address {address}", add)


def add_queue(namespace: str, device: str, queue: Mapping[str, Any]) -> None:
    """Let what leaves by `device` pass a queue, which shapes it or only counts."""
    _ask(
        namespace,
        f"add a queue of kind {queue['kind']} to {device}",
        lambda kernel: kernel.tc("add", index=_index(kernel, device), **queue),
    )


def queue_state(namespace: str, device: str) -> QueueState:
    """The root queue of `device` now."""

    def look(kernel: Any) -> QueueState:
        (shown,) = kernel.get_qdiscs(index=_index(kernel, device))
        sent = shown.get_nested("TCA_STATS2", "TCA_STATS_BASIC")
        shaped = shown.get("kind") == "tbf"
        rate = shown.get_nested("TCA_OPTIONS", "TCA_TBF_PARMS")["rate"] if shaped else None
        return QueueState(rate, sent["bytes"], sent["packets"])

    return _ask(namespace, f"read the queue of {device}", look)


def switch(namespace: str, device: str, state: Literal["up", "down"]) -> None:
    """Switch `device` on or off."""
    _ask(
        namespace,
        f"switch {device} {state}",
        lambda kernel: kernel.link("set", index=_index(kernel, device), state=state),
    )


def is_up(namespace: str, device: str) -> bool:
    """Whether `device` is switched on."""

    def look(kernel: Any) -> bool:
        (shown,) = kernel.get_links(_index(kernel, device))
        return bool(shown["flags"] & _IFF_UP)

    return _ask(namespace, f"read the state of {device}", look)


def _ask(namespace: str, deed: str, act: Callable[[Any], T]) -> T:
    """What `act` makes of a netlink socket inside `namespace`."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    def inside() -> T:
        join(namespace)
        with IPRoute() as kernel:
            return act(kernel)

    try:
        return _in_a_thread(inside)
    except NetlinkError as error:
        cure = "a lab needs a kernel with veth, bridge and sch_tbf"
        raise LabError(f"could not {deed} in {namespace}: {error.args[1]}; {cure}") from None
    except OSError as error:
        cure = "if the lab was removed meanwhile, make it again"
        raise LabError(f"could not {deed} in {namespace}: {error.strerror}; {cure}") from None


def _in_a_thread(act: Callable[[], T]) -> T:
    """What changes its namespace, without moving the rest of this process; Ctrl-C waits until it is done."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(act).result()


def _index(kernel: Any, device: str) -> int:
    for index in kernel.link_lookup(ifname=device):
        return int(index)
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


def _switch_on(kernel: Any, device: str) -> None:
    if Path("/proc/net/if_inet6").exists():
        kernel.link("set", index=_index(kernel, device), IFLA_AF_SPEC=_NO_IPV6_ADDRESS)
    kernel.link("set", index=_index(kernel, device), state="up")


def _capabilities() -> set[int]:
    status = Path("/proc/self/status").read_text()
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return {bit for bit in range(mask.bit_length()) if mask >> bit & 1}
