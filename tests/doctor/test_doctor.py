"""laconic doctor: every finding is provoked and found, with its cure, and nothing is found where all is well."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic import cli
from laconic.cli.doctor import merged
from laconic.doctor import CHECKS, Finding, Seen, examine, findings
from laconic.doctor.examine import gather_all
from laconic.doctor.facts import HostFacts, facts_here
from laconic.errors import PeerError
from laconic.planning import PairLink
from laconic.planning.links import EchoTimes
from laconic.transport import Interface, interfaces, own_group, world
from laconic_lab.errors import LabError
from laconic_lab.network import Host, Lab, LabSpec, Link, netlink, noted_signals, run
from laconic_lab.network.enter import CONGESTION_CONTROL, join
from tests.workers import WorkerPool

try:
    netlink.require()
    MISSING = ""
except LabError as error:
    MISSING = str(error)
needs_lab = pytest.mark.skipif(bool(MISSING), reason=MISSING or "a lab can be made here")
pytestmark = pytest.mark.xdist_group("lab")

GBIT = 1e9 / 8
ETH0 = Interface("eth0", "10.0.0.1", "", 1500, 1e9)
ETH1 = replace(ETH0, name="eth1", address="10.1.0.1")
HOST = HostFacts(
    host="host0",
    machine="host0",
    versions={"laconic": "1", "torch": "2.13.0", "Python": "3.11.1"},
    num_threads=4,
    num_cores=4,
    kernels="",
    asked_interface="",
    interfaces=("lo", "eth0", "eth1"),
    used=ETH0,
    towards=ETH0,
    work_s=0.01,
)


def seen(num_hosts: int = 3, **changes: Any) -> Seen:
    """Hosts on which all is well, but for host 1."""
    facts = [replace(HOST, host=f"host{i}", machine=f"host{i}") for i in range(num_hosts)]
    facts[1] = replace(facts[1], **changes)
    return Seen(tuple(facts), _links(num_hosts), {1: EchoTimes(0.002, 0.005, 0.001)})


def _links(num_hosts: int, slow: Sequence[tuple[int, int]] = ()) -> tuple[PairLink, ...]:
    ends = [(a, b) for a in range(num_hosts) for b in range(num_hosts) if a != b]
    return tuple(PairLink(*end, 1e-4, GBIT * (0.05 if end in slow else 0.9)) for end in ends)


def test_nothing_is_found_where_all_is_well() -> None:
    assert findings(seen()) == [] and findings(seen(2)) == []
    assert findings(Seen((HOST,))) == [], "one host alone"
    assert findings(Seen((replace(HOST, num_threads=2), replace(HOST, num_threads=2)))) == [], "two ranks of one host"


SLOW_HOST = [(0, 1), (1, 0), (1, 2), (2, 1)]
WIREGUARD = replace(ETH0, kind="wireguard", name="vpn")
FAULTS = {
    "interface": (seen(used=ETH1), "host1", "GLOO_SOCKET_IFNAME=eth0"),
    "interface that is not there": (seen(asked_interface="eth7"), "host1", "GLOO_SOCKET_IFNAME=eth0"),
    "tunnel or bridge": (seen(used=WIREGUARD, towards=WIREGUARD), "host1", "below it"),
    "tunnel or bridge of docker": (
        seen(used=replace(ETH0, kind="veth", address="172.17.0.2")),
        "host1",
        "--network=host",
    ),
    "rate": (replace(seen(), nominal_bits_per_s=10e9), "host0 to host1", "ethtool"),
    "rate that the interface says": (
        replace(seen(2), links=_links(2, [(0, 1), (1, 0)])),
        "host0 to host1",
        "ethtool",
    ),
    "slow link": (
        replace(seen(), links=_links(3, SLOW_HOST), nominal_bits_per_s=1e6),
        "host1",
        "leave it out",
    ),
    "slow link one way": (
        replace(seen(2), links=_links(2, [(1, 0)]), nominal_bits_per_s=1e6),
        "host1 to host0",
        "that way alone",
    ),
    "MTU": (seen(used=replace(ETH0, mtu=1400)), "host1", "1400"),
    "MTU of all": (Seen((replace(HOST, used=replace(ETH0, mtu=1400)),)), "host0", "overlay"),
    "congestion control": (seen(congestion_control="bbr"), "host1", "tcp_congestion_control=cubic"),
    "slow host": (seen(work_s=0.02), "host1", "top"),
    "threads": (seen(num_threads=16), "host1", "OMP_NUM_THREADS=4"),
    "threads of all processes": (Seen((replace(HOST, num_threads=3),) * 2), "host0", "OMP_NUM_THREADS=2"),
    "kernels": (seen(kernels="were not built"), "host1", "compiler"),
    "kernels asked for": (seen(kernels="LACONIC_KERNELS=reference"), "host1", "unset LACONIC_KERNELS"),
    "clocks": (replace(seen(), clocks={1: EchoTimes(0.002, -0.05, 0.001)}), "host1", "NTP"),
    "versions": (seen(versions={**HOST.versions, "torch": "2.11.0"}), "host1", "install torch 2.13.0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_nothing_else(name: str) -> None:
    what, host, cure = FAULTS[name]
    reported = findings(what)
    assert {name.startswith(finding.name) for finding in reported} == {True}, reported
    assert reported[0].host == host and cure in reported[0].cure
    assert all("\n" not in text for finding in reported for text in vars(finding).values())


def test_one_cause_is_one_row() -> None:
    rows = merged(findings(FAULTS["rate"][0]))
    assert [row[:2] for row in rows] == [["rate", "host0 to host1 and 5 more"]]
    slow = replace(seen(), links=_links(3, [(0, 2), (2, 0), (1, 2), (2, 1)]), nominal_bits_per_s=10e9)
    assert [row[:2] for row in merged(findings(slow)) if "host2" in row[1]] == [["slow link", "host2"]]


def test_each_check_has_a_fault_that_it_finds() -> None:
    assert all(any(list(check(what)) for what, _, _ in FAULTS.values()) for check in CHECKS.values())


def test_clocks_that_an_echo_cannot_tell_apart_are_no_finding() -> None:
    assert findings(replace(seen(), clocks={1: EchoTimes(0.09, 0.05, 0.045)})) == []


def test_a_link_that_was_measured_too_shortly_for_tcp_is_no_finding() -> None:
    what = FAULTS["rate that the interface says"][0]
    unsettled = tuple(replace(link, settled=False) for link in what.links)
    assert findings(what) and findings(replace(what, links=unsettled)) == []


def test_facts_are_told_and_read_the_same() -> None:
    mine = facts_here(work=lambda: None)
    assert HostFacts.from_dict(json.loads(json.dumps(asdict(mine)))) == mine
    assert mine.interfaces and "lo" in mine.interfaces and mine.num_cores > 0


def test_the_command_says_it_as_a_table_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LACONIC_KERNELS", "reference")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert cli.main(["doctor", "--json", "--strict"]) == 1
    names = {finding["name"] for finding in json.loads(capsys.readouterr().out)}
    assert names >= {"kernels", "interface"}
    assert cli.main(["doctor"]) == 0
    assert "unset LACONIC_KERNELS" in capsys.readouterr().out
    monkeypatch.setattr("laconic.doctor.examine", lambda: [])
    assert cli.main(["doctor", "--strict"]) == 0
    assert capsys.readouterr().out.startswith("nothing found")
    assert cli.main(["doctor", "--link", "1gbit"]) == 2


def _examined() -> tuple[list[Finding], list[Any]]:
    rank = dist.get_rank()
    return examine(world()), gather_all(world(), [rank, list(range(1000 * rank))])


def test_ranks_of_one_host_agree(two_workers: WorkerPool) -> None:
    (first, heard), (second, _) = two_workers.run(_examined)
    assert first == second
    assert heard == [[0, []], [1, list(range(1000))]]
    assert not {"rate", "slow link", "clocks", "versions"} & {finding.name for finding in first}


def _examined_alone() -> str:
    """What the first rank says where the other says nothing."""
    group = own_group(world(), torch.device("cpu"), timeout_s=1.0)
    if dist.get_rank() == 1:
        time.sleep(2.0)  # holds the group, and its connections
        return ""
    with pytest.raises(PeerError) as caught:
        examine(group, work=lambda: None)
    return str(caught.value)


def test_silence_is_one_line_with_a_cure(two_workers: WorkerPool) -> None:
    said, _ = two_workers.run(_examined_alone)
    assert "MTU" in said and "\n" not in said


def _set(host: Host, device: str, **what: Any) -> None:
    """Change an interface of a host."""
    netlink.ask(
        host.namespace, "set", lambda kernel: kernel.link("set", index=netlink.index_of(kernel, device), **what)
    )


def _add(host: Host, name: str, kind: str, **what: Any) -> None:
    netlink.ask(host.namespace, "add", lambda kernel: kernel.link("add", ifname=name, kind=kind, **what))


def _interfaces_of(host: Host) -> dict[str, Interface]:
    def look() -> dict[str, Interface]:
        join(host.namespace)
        return interfaces()

    return netlink.in_a_child(look)


@needs_lab
def test_kinds_addresses_and_mtus_are_the_kernels() -> None:
    with Lab.create(LabSpec(1)) as lab:
        (host,) = lab.hosts
        netlink.add_bridge(host.namespace, "br-lab")
        _add(host, "over", "vxlan", vxlan_id=7)
        _set(host, "eth0", mtu=1300)
        there = _interfaces_of(host)
    assert {name: one.kind for name, one in there.items()} == {
        "lo": "",
        "eth0": "veth",
        "br-lab": "bridge",
        "over": "vxlan",
    }
    assert there["eth0"] == Interface("eth0", host.address, "veth", 1300), "a veth says 10 Gbit/s, which is not so"


ON_A_HOST = """
import faulthandler, json, os, time
faulthandler.dump_traceback_later(240, exit=True)
fault = json.loads(os.environ["FAULTS"]).get(os.environ["LACONIC_HOST"], {})
os.environ.update(RANK=os.environ["LACONIC_HOST"], WORLD_SIZE=os.environ["LACONIC_HOSTS"], **fault.get("env", {}))
import torch.distributed as dist
from dataclasses import asdict
from laconic.doctor import examine, facts
from laconic.transport import world
facts.__version__ = fault.get("version", facts.__version__)
dist.init_process_group("gloo")
work = {"work": lambda: time.sleep(fault.get("sleep_s", 0.02))} if json.loads(os.environ["FAKES"]) else {}
nominal = float(os.environ["NOMINAL"]) or None
found = examine(world(), nominal_bits_per_s=nominal, clock=lambda: time.time() + fault.get("ahead_s", 0), **work)
if dist.get_rank() == 0:
    print(json.dumps([asdict(finding) for finding in found]), flush=True)
dist.barrier()
os._exit(0)
"""


def _found_in(
    lab: Lab,
    capfd: pytest.CaptureFixture[str],
    faults: dict[int, dict[str, Any]] | None = None,
    *,
    env: dict[str, str] | None = None,
    nominal_bits_per_s: float = 0.0,
) -> list[tuple[str, str]]:
    """(name, host) of each finding; hosts are compared by a sleep, which this busy machine does not disturb."""
    told = {"FAULTS": json.dumps(faults or {}), "FAKES": "true", "NOMINAL": str(nominal_bits_per_s)}
    with noted_signals() as signals:
        variables = {"OMP_NUM_THREADS": "1", **told, **(env or {})}
        assert run(lab, [sys.executable, "-c", ON_A_HOST], signals, marked=False, env=variables) == 0
    reported = json.loads(capfd.readouterr().out.splitlines()[-1])
    return [(finding["name"], finding["host"]) for finding in reported]


@needs_lab
@pytest.mark.slow
def test_faults_of_hosts_are_found(capfd: pytest.CaptureFixture[str]) -> None:
    faults: dict[int, dict[str, Any]] = {
        0: {"env": {"OMP_NUM_THREADS": "999"}},
        1: {"sleep_s": 0.2, "ahead_s": 5.0, "env": {"LACONIC_KERNELS": "reference"}},
        2: {"version": "9.9"},
    }
    with Lab.create(LabSpec(3, Link.parse("100mbit"), {2: Link.parse("5mbit")})) as lab:
        assert set(_found_in(lab, capfd, faults)) == {
            ("threads", "host0"),
            ("slow host", "host1"),
            ("clocks", "host1"),
            ("kernels", "host1"),
            ("versions", "host2"),
            ("slow link", "host2"),
        }


@needs_lab
@pytest.mark.slow
def test_the_wrong_interface_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with Lab.create(LabSpec(2, Link.parse("500mbit"))) as lab:
        netlink.add_bridge(lab.switch, "second")
        for host in lab.hosts:
            netlink.add_cable(lab.switch, f"slow{host.index}", host.namespace, "eth1", "second")
            netlink.add_address(host.namespace, "eth1", f"10.78.0.{host.index + 1}")
            netlink.add_queue(host.namespace, "eth1", Link.parse("5mbit").queue)
        slow = {host.index: {"env": {"GLOO_SOCKET_IFNAME": "eth1"}} for host in lab.hosts}
        assert set(_found_in(lab, capfd, slow, nominal_bits_per_s=500e6)) == {
            ("interface", "host0"),
            ("interface", "host1"),
            ("rate", "host0 to host1"),
            ("rate", "host1 to host0"),
        }


@needs_lab
@pytest.mark.slow
def test_a_bridge_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with Lab.create(LabSpec(2, Link.parse("50mbit"))) as lab:
        host = lab.hosts[1]
        netlink.add_bridge(host.namespace, "br-lab")

        def move(kernel: Any) -> None:
            kernel.addr("del", index=netlink.index_of(kernel, "eth0"), address=host.address, prefixlen=24)
            kernel.link("set", index=netlink.index_of(kernel, "eth0"), master=netlink.index_of(kernel, "br-lab"))

        netlink.ask(host.namespace, "put eth0 into a bridge", move)
        netlink.add_address(host.namespace, "br-lab", host.address)
        inside = {1: {"env": {"GLOO_SOCKET_IFNAME": "br-lab"}}}
        assert _found_in(lab, capfd, inside) == [("tunnel or bridge", "host1")]


def _congestion_control_of(host: Host, wanted: str = "") -> str:
    """What TCP goes by on a host, after it was set to what is wanted."""

    def look() -> str:
        join(host.namespace)
        if wanted:
            CONGESTION_CONTROL.write_text(wanted)
        return CONGESTION_CONTROL.read_text().strip()

    return netlink.in_a_child(look)


@needs_lab
@pytest.mark.slow
def test_another_congestion_control_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    with Lab.create(LabSpec(2, Link.parse("50mbit"))) as lab:
        assert _congestion_control_of(lab.hosts[0]) == "cubic", "whatever this machine's is"
        try:
            _congestion_control_of(lab.hosts[1], "bbr")
        except OSError:
            pytest.skip("this kernel has no BBR")
        assert _found_in(lab, capfd) == [("congestion control", "host1")]


@needs_lab
@pytest.mark.slow
def test_another_mtu_and_a_rate_below_nominal_are_found_by_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--hosts", "2", "--link", "20mbit", "--nominal", "1gbit", "--json", "--strict"]) == 1
    found_there = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert {"host0 to host1", "host1 to host0"} <= {one["host"] for one in found_there if one["name"] == "rate"}
    with Lab.create(LabSpec(2, Link.parse("50mbit"))) as lab:
        _set(lab.hosts[1], "eth0", mtu=1300)
        assert ("MTU", "host1") in _found_in(lab, capfd)
