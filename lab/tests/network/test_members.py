"""Members on hosts of their own: a link is cut and heals, the server is killed and comes back, and nobody waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.tests.network.test_lab import needs_lab
from laconic_lab.network import Host, Lab, LabSpec, Link, netlink
from laconic_lab.network.host import INTERFACE
from tests.workers import wait_until

pytestmark = [pytest.mark.xdist_group("lab"), pytest.mark.slow]

ADDRESS = "10.77.0.1:7700"
MEMBER = """
import json, sys, time, torch, laconic
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
member = laconic.join(sys.argv[1], model, optimizer, id=sys.argv[2])
longest = 0.0
while True:
    inputs = torch.randn(32, 64)
    loss = (model(inputs) - inputs.sum(1, keepdim=True).tanh()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    begun = time.monotonic()
    member.step(tokens=32, loss=loss.item())
    longest = max(longest, time.monotonic() - begun)
    with open(sys.argv[3], "a") as lines:
        print(json.dumps({"longest_s": longest, **member.metrics()}), file=lines, flush=True)
    time.sleep(0.01)
"""


def _serve(host: Host, folder: Path) -> subprocess.Popen[str]:
    """A server that listens by now."""
    words = ["serve", "--listen", "0.0.0.0:7700", "--scheme", "streaming:every=16", "--wait-budget", "3"]
    server = host.popen([sys.executable, "-m", "laconic", *words, "--state", str(folder)], stderr=subprocess.PIPE)
    assert server.stderr is not None and "members dial" in server.stderr.readline()
    return server


def _put_behind(lab: Lab, index: int, router: int) -> None:
    """Move a host's cable to another host, which is its NAT from then on: it can only dial out."""
    host, gateway = lab.host(index), lab.host(router)
    near, far = f"192.168.{index}.2", f"192.168.{index}.1"
    lab.cut(index)
    netlink.switch(host.namespace, INTERFACE, "down")
    netlink.add_cable(gateway.namespace, f"lan{index}", host.namespace, "lan")
    netlink.add_address(gateway.namespace, f"lan{index}", far)
    netlink.add_address(host.namespace, "lan", near)
    netlink.ask(host.namespace, f"add a route by {far}", lambda kernel: kernel.route("add", dst="default", gateway=far))
    netlink.ask(gateway.namespace, "masquerade", _masquerade)


def _masquerade(_: Any) -> None:
    """Let a host forward packets, and send them on under its own address."""
    from pyroute2.nftables.expressions import masq
    from pyroute2.nftables.main import NFTables

    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    with NFTables() as tables:
        tables.table("add", name="nat")
        tables.chain("add", table="nat", name="out", hook="postrouting", type="nat", policy=1)
        tables.rule("add", table="nat", chain="out", expressions=[masq()])


def _last(path: Path) -> dict[str, Any]:
    lines = path.read_text().splitlines() if path.exists() else []
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return last


@needs_lab
def test_members_outlive_a_cut_link_and_a_killed_server(tmp_path: Path) -> None:
    logs = {number: tmp_path / f"{number}.jsonl" for number in (1, 2, 3)}

    def rounds(number: int) -> float:
        return float(_last(logs[number]).get("rounds", 0))

    with Lab.create(LabSpec(4, Link.parse("100mbit"))) as lab:
        server = _serve(lab.hosts[0], tmp_path / "run")
        for number, log in logs.items():
            lab.hosts[number].popen([sys.executable, "-c", MEMBER, ADDRESS, f"m{number}", str(log)])
        assert wait_until(lambda: min(map(rounds, logs)) > 8, timeout_s=120)
        lab.cut(2)
        before = rounds(1)
        assert wait_until(lambda: rounds(1) > before + 40, timeout_s=60), "the others go on"
        lab.heal(2)
        returned = rounds(2)
        assert wait_until(lambda: rounds(2) > returned + 8, timeout_s=60), "who was cut off comes back"
        server.kill()
        server.wait()
        trained = _last(logs[1])["steps"]
        assert wait_until(lambda: _last(logs[1])["steps"] > trained + 50), "nobody waits for a server"
        _serve(lab.hosts[0], tmp_path / "run")
        since = {number: rounds(number) for number in logs}
        assert wait_until(lambda: all(rounds(n) > since[n] + 8 for n in logs), timeout_s=120), "all come back to it"
        for log in logs.values():
            assert _last(log)["run_rounds"] > 40


@needs_lab
def test_members_behind_routers_train_over_one_port(tmp_path: Path) -> None:
    logs = {number: tmp_path / f"{number}.jsonl" for number in (2, 4)}
    with Lab.create(LabSpec(5, Link.parse("100mbit"))) as lab:
        for number in logs:
            _put_behind(lab, number, router=number - 1)
        _serve(lab.hosts[0], tmp_path / "run")
        for number, log in logs.items():
            lab.hosts[number].popen([sys.executable, "-c", MEMBER, ADDRESS, f"m{number}", str(log)])
        assert wait_until(lambda: all(_last(log).get("rounds", 0) > 8 for log in logs.values()), timeout_s=120)
        listed = (
            lab.hosts[0]
            .popen([sys.executable, "-m", "laconic", "members", ADDRESS, "--json"], stdout=subprocess.PIPE)
            .communicate()[0]
        )
        addresses = {member["id"]: member["address"].rpartition(":")[0] for member in json.loads(listed)["members"]}
        assert addresses == {"m2": "10.77.0.2", "m4": "10.77.0.4"}, "each is seen as its router"
        with pytest.raises(subprocess.CalledProcessError):  # nothing reaches in
            dial = "import socket; socket.create_connection(('192.168.2.2', 22), 2)"
            subprocess.run(
                [*lab.hosts[0].entering.split(), sys.executable, "-c", dial], check=True, capture_output=True
            )
