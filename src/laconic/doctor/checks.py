"""Checks of things that may be slow or wrong, one function each: findings from what was seen, and nothing else."""

from __future__ import annotations

import ipaddress
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from laconic.doctor.facts import HostFacts
from laconic.planning import EchoTimes, PairLink
from laconic.transport import Interface

_USUAL_MTU = 1500
_TOO_SLOW = 0.5  # of what was to be expected of a link; TCP's headers alone take 5 %
_SLOWER_WORK = 1.25
_CLOCKS_S = 0.01
_TUNNELS = {"tun", "wireguard", "vxlan", "geneve", "ipip", "gre", "gretap", "sit", "ip6tnl", "vti", "xfrm"}
_BRIDGES = {"bridge", "openvswitch"}
_TUNNEL_NAMES = re.compile(r"(tun|tap|wg|zt|tailscale|flannel|cali|vxlan|weave)")
_BRIDGE_NAMES = re.compile(r"(docker|br-|cni|virbr|lxcbr|podman)")
_DOCKERS_OWN = ipaddress.ip_network("172.17.0.0/16")


@dataclass(frozen=True)
class Finding:
    """Something that is slow or wrong, where, and what to do about it."""

    name: str  # of the check
    host: str
    measured: str
    expected: str
    cure: str


@dataclass(frozen=True)
class Seen:
    """Everything that was seen: facts by rank, and what was measured between the first ranks of hosts."""

    facts: tuple[HostFacts, ...]
    links: tuple[PairLink, ...] = ()
    clocks: Mapping[int, EchoTimes] = field(default_factory=dict)  # by rank, as the first one sees them
    nominal_bits_per_s: float | None = None  # of every link, where somebody says so

    @cached_property
    def leaders(self) -> list[int]:
        """The first rank of each host."""
        machines = [facts.machine for facts in self.facts]
        return [rank for rank, machine in enumerate(machines) if machine not in machines[:rank]]

    @property
    def hosts(self) -> list[HostFacts]:
        """The facts of each host's first rank."""
        return [self.facts[rank] for rank in self.leaders]

    @property
    def pairs(self) -> list[PairLink]:
        """Every link between hosts whose rate is known, not only that it is no less."""
        return [
            pair
            for pair in self.links
            if pair.settled and self.facts[pair.source].machine != self.facts[pair.target].machine
        ]

    def nominal(self, pair: PairLink) -> float | None:
        """The nominal rate of a link: the lesser of its ends."""
        if self.nominal_bits_per_s is not None:
            return self.nominal_bits_per_s
        ends = [self.facts[rank].used for rank in (pair.source, pair.target)]
        return min((end.bits_per_s for end in ends if end and end.bits_per_s is not None), default=None)

    def ends(self, pair: PairLink) -> str:
        """The hosts at both ends of a link."""
        return f"{self.facts[pair.source].host} to {self.facts[pair.target].host}"


Reports = Iterator[tuple[str, str, str, str]]  # of a check: the fields of a finding after its name


def interface(seen: Seen) -> Reports:
    """Gloo uses another interface than the one that joins the hosts."""
    for facts in seen.hosts:
        used, towards = facts.used, facts.towards
        named = facts.asked_interface.split(",")[0]
        if named and facts.interfaces and named not in facts.interfaces:
            measured = f"GLOO_SOCKET_IFNAME={named}, which is not there"
            yield facts.host, measured, f"one of {', '.join(facts.interfaces)}", _name_it(towards)
        elif used and towards and _differ(used, towards) and (named or len(seen.hosts) > 1):
            expected = f"{towards.name} ({towards.address}), by which the other hosts are reached"
            yield facts.host, f"Gloo uses {used.name} ({used.address})", expected, _name_it(towards)


def tunnel_or_bridge(seen: Seen) -> Reports:
    """A tunnel or a container's bridge lies between the hosts."""
    for facts in seen.hosts:
        if facts.used is None or not (between := _between(facts.used)):
            continue
        cure = {
            "tunnel": "use the interface below it where the network may be trusted; its cipher and headers cost",
            "bridge": "give containers the host's network (docker run --network=host), and name its interface",
        }[between]
        measured = f"{facts.used.name} is a {between} ({facts.used.kind or 'by its name'})"
        yield facts.host, measured, "a device of the host", cure


def rate(seen: Seen) -> Reports:
    """A link carries much less than it is said to."""
    cure = "look for other traffic, a shaper, a half-duplex port or a cable (ethtool); many streams may do more"
    for pair in seen.pairs:
        nominal = seen.nominal(pair)
        if nominal is not None and 8 * pair.bytes_per_s < _TOO_SLOW * nominal:
            yield seen.ends(pair), _bits(8 * pair.bytes_per_s), f"{_bits(nominal)} nominal", cure


def slow_link(seen: Seen) -> Reports:
    """The links of one host, or one way of a link, are much slower than the others."""
    if len(seen.pairs) == 2:
        slower, faster = sorted(seen.pairs, key=lambda pair: pair.bytes_per_s)
        if slower.bytes_per_s < _TOO_SLOW * faster.bytes_per_s:
            measured, other = _bits(8 * slower.bytes_per_s), _bits(8 * faster.bytes_per_s)
            cure = "look at what shapes or fills that way alone (a firewall, an upload limit)"
            yield seen.ends(slower), measured, f"{other}, as the other way", cure
        return
    cure = "look at its cable, port and interface, or leave it out: all wait for it"
    for rank in seen.leaders:
        own = [8 * pair.bytes_per_s for pair in seen.pairs if rank in (pair.source, pair.target)]
        others = [8 * pair.bytes_per_s for pair in seen.pairs if rank not in (pair.source, pair.target)]
        if own and others and statistics.median(own) < _TOO_SLOW * statistics.median(others):
            expected = f"{_bits(statistics.median(others))}, as between the others"
            yield seen.facts[rank].host, _bits(statistics.median(own)), expected, cure


def mtu(seen: Seen) -> Reports:
    """Packets must be shorter than usual, or than another host's."""
    used = [(facts.host, facts.used.mtu) for facts in seen.hosts if facts.used and facts.used.mtu]
    most = max((size for _, size in used), default=0)
    for host, size in used:
        if size < most:
            yield host, f"{size}", f"{most}, as elsewhere", f"set it to one value on all hosts, {size}"
        elif size < _USUAL_MTU:
            cure = "a tunnel, an overlay or a cloud's network lowers it; raise it where every hop allows more"
            yield host, f"{size}", f"{_USUAL_MTU}", cure


def congestion_control(seen: Seen) -> Reports:
    """TCP sends at a pace that connections which take turns do not let it find."""
    expected = "cubic: connections to peers take turns, and BBR goes on at the pace of each one's last"
    cure = "sysctl -w net.ipv4.tcp_congestion_control=cubic, unless packets get lost on the way"
    for facts in seen.hosts if len(seen.hosts) > 1 else ():
        if facts.congestion_control.startswith("bbr"):
            yield facts.host, facts.congestion_control, expected, cure


def slow_host(seen: Seen) -> Reports:
    """One host computes more slowly than the others."""
    cure = "see what else runs there (top), its clock rate and its cooling, or leave it out: all wait for it"
    taken = [min(f.work_s for f in seen.facts if f.machine == host.machine) for host in seen.hosts]
    for number, (facts, seconds) in enumerate(zip(seen.hosts, taken, strict=True)):
        others = taken[:number] + taken[number + 1 :]
        if others and seconds > _SLOWER_WORK * statistics.median(others):
            expected = f"{1e3 * statistics.median(others):.1f} ms, as elsewhere"
            yield facts.host, f"{1e3 * seconds:.1f} ms for a fixed piece of work", expected, cure


def threads(seen: Seen) -> Reports:
    """The processes of a host have more threads than it has cores."""
    for host in seen.hosts:
        here = [facts for facts in seen.facts if facts.machine == host.machine]
        num_threads = sum(facts.num_threads for facts in here)
        if num_threads > host.num_cores:
            measured = f"{num_threads} threads of {len(here)} {'process' if len(here) == 1 else 'processes'}"
            cure = f"export OMP_NUM_THREADS={max(1, host.num_cores // len(here))}"
            yield host.host, measured, f"{host.num_cores} cores", cure


def kernels(seen: Seen) -> Reports:
    """laconic runs on its reference kernels."""
    for facts in seen.hosts:
        is_named = "LACONIC_KERNELS" in facts.kernels
        cure = "install a C++17 compiler (triton for CUDA), then laconic again"
        if facts.kernels:
            yield facts.host, facts.kernels, "native kernels", "unset LACONIC_KERNELS" if is_named else cure


def clocks(seen: Seen) -> Reports:
    """Clocks differ, so that logs and timeouts of hosts do not fit together."""
    cure = "run chrony or another client of NTP on all hosts"
    for rank, clock in seen.clocks.items():
        if abs(clock.ahead_s) - clock.error_s > _CLOCKS_S:
            measured = f"{1e3 * clock.ahead_s:+.0f} ms beside {seen.facts[0].host}"
            yield seen.facts[rank].host, measured, f"within {1e3 * _CLOCKS_S:.0f} ms", cure


def versions(seen: Seen) -> Reports:
    """Ranks run other releases."""
    reported = set()
    first = seen.facts[0]
    for facts in seen.facts[1:]:
        for name, version in facts.versions.items():
            wanted = first.versions[name]
            if version != wanted and (facts.machine, name) not in reported:
                reported.add((facts.machine, name))
                expected = f"{wanted}, as on {first.host}"
                yield facts.host, f"{name} {version}", expected, f"install {name} {wanted} there"


CHECKS: dict[str, Callable[[Seen], Reports]] = {
    "versions": versions,
    "interface": interface,
    "tunnel or bridge": tunnel_or_bridge,
    "rate": rate,
    "slow link": slow_link,
    "MTU": mtu,
    "congestion control": congestion_control,
    "slow host": slow_host,
    "threads": threads,
    "kernels": kernels,
    "clocks": clocks,
}


def findings(seen: Seen) -> list[Finding]:
    """The reports of all checks."""
    return [Finding(name, *report) for name, check in CHECKS.items() for report in check(seen)]


def _differ(used: Interface, towards: Interface) -> bool:
    """Return whether they are two, and neither is the loopback, by which a host only reaches itself."""
    return used.name != towards.name and "lo" not in (used.name, towards.name)


def _name_it(towards: Interface | None) -> str:
    name = towards.name if towards and towards.name != "lo" else "the interface that joins your hosts"
    return f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}" if " " not in name else f"name {name} in it"


def _between(used: Interface) -> str:
    """The one of the two that it is, or nothing."""
    if used.kind in _TUNNELS or _TUNNEL_NAMES.match(used.name):
        return "tunnel"
    if used.kind in _BRIDGES or _BRIDGE_NAMES.match(used.name):
        return "bridge"
    # Inside a container the interface is a veth, and the bridge is outside.
    is_dockers = used.kind == "veth" and used.address and ipaddress.ip_address(used.address) in _DOCKERS_OWN
    return "bridge" if is_dockers else ""


def _bits(per_s: float) -> str:
    scale, unit = next((scale, unit) for scale, unit in ((1e9, "G"), (1e6, "M"), (0, "k")) if per_s >= scale)
    return f"{per_s / (scale or 1e3):.3g} {unit}bit/s"
