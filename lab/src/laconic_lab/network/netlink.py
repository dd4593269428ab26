"""Network namespaces, links and queues, by the kernel's own calls and messages: the only hands the lab has.

A namespace is named by its path: /proc/HOLDER/fd/NUMBER.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import platform
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from laconic_lab.errors import LabError
from laconic_lab.network import enter
from laconic_lab.network.enter import CLONE_NEWNET, become_owner, call, join
from laconic_lab.network.spec import Link

_log = logging.getLogger("laconic.lab")

T = TypeVar("T")
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # bits of CapEff: links and queues; namespaces
SYSCTL = Path("/proc/sys")
_SETTINGS = {  # by which a kernel keeps user namespaces, or what an ordinary user may do in them, from its users
    "kernel.unprivileged_userns_clone": "0",
    "kernel.apparmor_restrict_unprivileged_userns": "1",
    "user.max_user_namespaces": "0",
    "user.max_net_namespaces": "0",
}
_IFF_UP = 1
RELAY = Path(__file__).with_name("relay")
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _ETH_P_ALL = 263, 15, 23, 3
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 33, 35
_RECEIVE_BYTES = 4 << 20  # what may arrive while the relay waits for a core
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
    try:
        import pyroute2  # noqa: F401
    except ModuleNotFoundError:
        raise LabError("a lab needs pyroute2: pip install 'laconic[lab]', or pyroute2 alone") from None
    if not has_root():
        try:
            in_a_child(_try_namespaces)
        except OSError:
            raise LabError(
                f"a lab needs root, or user namespaces, which {_forbidden_by()}; run it with sudo, or allow them"
            ) from None


def has_root() -> bool:
    """Return whether this process may make namespaces and links in its own user namespace."""
    return {_CAP_NET_ADMIN, _CAP_SYS_ADMIN} <= _capabilities()


def _try_namespaces() -> None:
    become_owner()
    call("unshare", CLONE_NEWNET)


def _forbidden_by() -> str:
    for name, forbidding in _SETTINGS.items():
        path = SYSCTL / name.replace(".", "/")
        if path.exists() and path.read_text().strip() == forbidding:
            return f"the kernel setting {name} = {forbidding} forbids"
    return "this container forbids (unshare is filtered, as docker does unless --privileged)"


def hold(count: int, note: Callable[[int], None]) -> None:
    """Make network namespaces in a process that holds them from when `note` has written its number down."""
    action = "hold" if has_root() else "own"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", enter.__file__, action, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as starting:
        assert starting.stdin and starting.stdout and starting.stderr
        try:
            holder, congestion_control = starting.stdout.readline().split()
            note(int(holder))
        except ValueError:
            reason = starting.stderr.read().strip().rpartition("\n")[2]
            raise LabError(f"{count} network namespaces could not be made: {reason}") from None
        if congestion_control != "cubic":
            _log.warning("TCP could not be set to cubic, so this lab's hosts use %s", congestion_control)
        starting.stdin.write("go")


def pids(namespace: str) -> list[int]:
    """The processes inside `namespace`; none where there is no such namespace."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and holds(namespace, int(entry))]


def holds(namespace: str, pid: int) -> bool:
    """Return whether a process is inside `namespace`."""
    try:
        return os.path.samefile(f"/proc/{pid}/ns/net", namespace)
    except OSError:  # one of the two has just ended
        return False


def add_bridge(namespace: str, name: str) -> None:
    """Add a bridge, switched on."""

    def add(kernel: Any) -> None:
        kernel.link("add", ifname=name, kind="bridge", br_mcast_snooping=0)
        _switch_on(kernel, name)

    ask(namespace, f"add the bridge {name}", add)


def add_cable(here: str, port: str, namespace_of_device: str, device: str, bridge: str | None = None) -> None:
    """Connect a new `device` of another namespace with a new `port`, switched on, of `here`, and that with a bridge."""

    def add(kernel: Any) -> None:
        kernel.link("add", ifname=port, kind="veth", peer={"ifname": device, "net_ns_fd": namespace_of_device})
        if bridge is not None:
            kernel.link("set", index=index_of(kernel, port), master=index_of(kernel, bridge))
        _switch_on(kernel, port)

    ask(here, f"add the cable of {port}", add)


def limit_segments(namespace: str, device: str, count: int) -> None:
    """Let TCP hand no more than `count` packets of the MTU to `device` as one."""
    _set(namespace, f"limit the segments of {device}", device, gso_max_segs=count)


def add_address(namespace: str, device: str, address: str) -> None:
    """Give `device` an address, of a network of 256, and switch it on."""

    def add(kernel: Any) -> None:
        kernel.addr("add", index=index_of(kernel, device), address=address, prefixlen=24)
        _switch_on(kernel, device)

    ask(namespace, f"add the address {address}", add)


def add_queue(namespace: str, device: str, queue: Mapping[str, Any]) -> None:
    """Let what leaves by `device` pass a queue, which shapes it or only counts, instead of the one that it has."""
    action = f"add a queue of kind {queue['kind']} to {device}"
    ask(namespace, action, lambda kernel: kernel.tc("replace", index=index_of(kernel, device), **queue))


def queue_state(namespace: str, device: str) -> QueueState:
    """The root queue of `device` now."""

    def look(kernel: Any) -> QueueState:
        (shown,) = kernel.get_qdiscs(index=index_of(kernel, device))
        sent = shown.get_nested("TCA_STATS2", "TCA_STATS_BASIC")
        shaped = shown.get("kind") == "tbf"
        rate = shown.get_nested("TCA_OPTIONS", "TCA_TBF_PARMS")["rate"] if shaped else None
        return QueueState(rate, sent["bytes"], sent["packets"])

    return ask(namespace, f"read the queue of {device}", look)


def switch(namespace: str, device: str, state: Literal["up", "down"]) -> None:
    """Switch `device` on or off."""
    _set(namespace, f"switch {device} {state}", device, state=state)


def is_up(namespace: str, device: str) -> bool:
    """Return whether `device` is switched on."""

    def look(kernel: Any) -> bool:
        (shown,) = kernel.get_links(index_of(kernel, device))
        return bool(shown["flags"] & _IFF_UP)

    return ask(namespace, f"read the state of {device}", look)


def start_relay(namespace: str, holder: int, links: Mapping[tuple[str, str], Link]) -> None:
    """Let a process inside `namespace` pass packets between pairs of its devices, late or not at all, like `links`.

    It has no capability of its own where its user has none, so its sockets are opened for it; it ends with `holder`.
    """
    if not RELAY.exists():
        raise LabError("delay and loss need the lab's relay: install a C++ compiler, then laconic again")

    def start() -> None:
        join(namespace)
        ports = []
        for (near, far), link in links.items():
            sockets = f"{_packet_socket(near)}:{_packet_socket(far)}"
            ports.append(
                f"{sockets}:{link.delay_s / 2 * 1e9:.0f}:{link.jitter_s / 2 * 1e9:.0f}:{link.loss_each_way:.9f}"
            )
        watched = os.pidfd_open(holder)
        os.set_inheritable(watched, True)
        if os.fork() == 0:  # nobody's child, as the holder is
            os.setsid()
            with suppress(PermissionError):  # root's relay goes first: on a busy machine it would be late
                os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            os.chdir("/")
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            try:
                os.execv(RELAY, [str(RELAY), str(watched), *ports])
            finally:
                os._exit(1)

    in_a_child(start)


def _packet_socket(device: str) -> int:
    """An open socket of every packet that arrives at `device`, with what segmentation offload says of it."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    for option in (socket.SO_RCVBUF, _SO_RCVBUFFORCE):  # what every user may have, then what root may
        with suppress(PermissionError):
            made.setsockopt(socket.SOL_SOCKET, option, _RECEIVE_BYTES)
    made.bind((device, _ETH_P_ALL))
    made.set_inheritable(True)
    return made.detach()


def _set(namespace: str, action: str, device: str, **options: Any) -> None:
    ask(namespace, action, lambda kernel: kernel.link("set", index=index_of(kernel, device), **options))


def ask(namespace: str, action: str, act: Callable[[Any], T]) -> T:
    """Call `act` with a netlink socket inside `namespace`."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    def inside() -> T:
        try:
            join(namespace)
            with IPRoute() as kernel:
                return act(kernel)
        except NetlinkError as error:
            cure = "a lab needs a kernel with veth, bridge and sch_tbf"
            raise LabError(f"could not {action}: {error.args[1]}; {cure}") from None
        except OSError as error:
            cure = "if the lab was removed meanwhile, make it again"
            raise LabError(f"could not {action}: {error.strerror}; {cure}") from None

    return in_a_child(inside)


def in_a_child(act: Callable[[], T]) -> T:
    """Call `act` in a child of one thread, and return or raise as it does: others may join no user namespace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, whose locks the child does not ask
        read, write = os.pipe()
        pid = os.fork()
    if pid == 0:
        try:
            outcome: tuple[T | None, BaseException | None] = (act(), None)
        except BaseException as error:
            outcome = (None, error)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(outcome))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        pickled = pipe.read()
    os.waitpid(pid, 0)
    if not pickled:  # it was killed, with all that was in the lab
        raise LabError("the lab was removed meanwhile; make it again")
    result, raised = pickle.loads(pickled)
    if raised is not None:
        raise raised
    return result  # type: ignore[no-any-return]


def index_of(kernel: Any, device: str) -> int:
    """The number of a device in its namespace."""
    for index in kernel.link_lookup(ifname=device):
        return int(index)
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


def _switch_on(kernel: Any, device: str) -> None:
    if Path("/proc/net/if_inet6").exists():
        kernel.link("set", index=index_of(kernel, device), IFLA_AF_SPEC=_NO_IPV6_ADDRESS)
    kernel.link("set", index=index_of(kernel, device), state="up")


def _capabilities() -> set[int]:
    status = Path("/proc/self/status").read_text()
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return {bit for bit in range(mask.bit_length()) if mask >> bit & 1}
