"""The network interfaces of this host, and which one a process group uses."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915
_RTM_GETLINK, _NLMSG_ERROR, _NLMSG_DONE, _NLM_F_DUMP_REQUEST = 18, 2, 3, 0x301
_IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 4, 18, 1
_ESTABLISHED = "01"
_NOWHERE = "192.0.2.1"  # an address of documentation: whatever is meant for it takes the default route
SYS = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """A network interface, as far as it is known."""

    name: str
    address: str = ""
    kind: str = ""  # the kernel's word for one that is no device: veth, bridge, tun, wireguard; empty for a device
    mtu: int = 0
    bits_per_s: float | None = None  # nominal, of a device that says it


def interfaces() -> dict[str, Interface]:
    """Every interface of this host by name; none where this is not Linux."""
    if sys.platform != "linux":
        return {}
    return {
        name: Interface(name, _address_or_none(name), kind, mtu, _nominal_bits_per_s(name))
        for name, kind, mtu in _links(_dumped_links())
    }


def interface_at(address: str) -> Interface | None:
    """The interface that has an address."""
    return next((each for each in interfaces().values() if each.address == address), None)


def address_towards(peer: str = "") -> str:
    """This host's address on the way to a peer, or on the default route; empty where there is no way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer or _NOWHERE, 9))  # a port of UDP: nothing is sent
        return str(probe.getsockname()[0])
    return ""


def address_to_be_used() -> str:
    """The address at which Gloo will listen: of the interface that is named, or of the host's name."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return _address_or_none(named)
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def address_in_use() -> str:
    """The address of most connections of this process, apart from those to the store; empty where it has none."""
    store = os.environ.get("MASTER_PORT", "")
    ends = Counter(here for here, *ports in _connections() if store not in map(str, ports))
    return next((address for address, _ in ends.most_common(1)), "")


def _connections() -> Iterator[tuple[str, int, int]]:
    """(own address, own port, the peer's port) of every connection over IPv4 that this process has open."""
    own = set()
    for file in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            own.add(os.readlink(file))
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            _, own_end, peer_end, state, *rest = line.split()
            address = _address_of_hex(own_end)
            if state == _ESTABLISHED and f"socket:[{rest[5]}]" in own and address:
                yield address, int(own_end.partition(":")[2], 16), int(peer_end.partition(":")[2], 16)


def _address_of_hex(text: str) -> str:
    """The IPv4 address in a line of /proc/net/tcp, which shows words in the machine's byte order."""
    words = re.findall("." * 8, text.partition(":")[0])
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    if len(packed) == 4:
        return str(ipaddress.IPv4Address(packed))
    return str(ipaddress.IPv6Address(packed).ipv4_mapped or "")


def address_of(name: str) -> str:
    """The IPv4 address of an interface; OSError where it has none, or where there is no such interface."""
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(packed[20:24])


def _address_or_none(name: str) -> str:
    try:
        return address_of(name)
    except OSError:
        return ""


def _nominal_bits_per_s(name: str) -> float | None:
    """The rate that a device claims; a virtual one, like a veth, says 10 Gbit/s whatever it carries."""
    if not (SYS / name / "device").exists():
        return None
    with suppress(OSError, ValueError):
        megabits = int((SYS / name / "speed").read_text())
        return megabits * 1e6 if megabits > 0 else None  # a virtual machine's says -1
    return None


def _links(dump: bytes) -> Iterator[tuple[str, str, int]]:
    """(name, kind, MTU) of each link in the kernel's answer."""
    for message_type, body in _messages(dump):
        if message_type in (_NLMSG_ERROR, _NLMSG_DONE):
            return
        attributes = dict(_attributes(body[16:]))
        nested = dict(_attributes(attributes.get(_IFLA_LINKINFO, b"")))
        kind = nested.get(_IFLA_INFO_KIND, b"").rstrip(b"\0").decode()
        yield (
            attributes[_IFLA_IFNAME].rstrip(b"\0").decode(),
            kind,
            int.from_bytes(attributes[_IFLA_MTU], sys.byteorder),
        )


def _dumped_links() -> bytes:
    """The kernel's own list, by netlink: /sys may show another network namespace than this process is in."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("=IHHII16x", 32, _RTM_GETLINK, _NLM_F_DUMP_REQUEST, 1, 0))
        dump = b""
        while not any(kind in (_NLMSG_ERROR, _NLMSG_DONE) for kind, _ in _messages(dump)):
            dump += kernel.recv(1 << 16)
    return dump


def _messages(dump: bytes) -> Iterator[tuple[int, bytes]]:
    while len(dump) >= 16:
        length, message_type = struct.unpack_from("=IH", dump)
        yield message_type, dump[16:length]
        dump = dump[_aligned(length) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, attribute = struct.unpack_from("=HH", data)
        yield attribute & 0x3FFF, data[4:length]  # without the bits that mark nesting and byte order
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return max(4, (length + 3) // 4 * 4)
