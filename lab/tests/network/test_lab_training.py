"""Training across the hosts of a lab: the same numbers as on one machine, and bytes that an interface saw."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from lab.tests.cli.test_cli import laconic
from laconic import cli
from laconic_lab.errors import LabError
from laconic_lab.network import Lab, LabSpec, labs, netlink, run
from laconic_lab.train.measurement import slowed

try:
    netlink.require()
    MISSING = ""
except LabError as error:
    MISSING = str(error)
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.xdist_group("lab")]

JOB = ["--steps", "12", "--batch", "4", "--eval-every", "6", "--json"]


def test_hosts_give_the_numbers_of_processes_and_their_links_carry_what_is_counted(few_images: Path) -> None:
    job = [*JOB, "--data", str(few_images), "--scheme", "topk:rho=0.01"]
    here = laconic("train", *job, "--workers", "2")
    there = laconic("train", *job, "--hosts", "2", "--link", "100mbit", "--slow", "1=2")  # which changes no number
    assert here.returncode == there.returncode == 0, here.stderr + there.stderr
    alone, apart = (json.loads(ran.stdout.splitlines()[-1]) for ran in (here, there))
    assert alone["link_bytes_out"] is None
    for key in ("loss", "accuracy", "bytes_out", "bytes_in", "ratio"):
        assert apart[key] == alone[key]
    # Headers and acknowledgements (10 %), and what TCP sends again on a busy machine; counted twice it would be 2.
    assert 1 <= apart["link_bytes_out"] / apart["bytes_out"] < 1.5


@pytest.mark.slow
def test_compare_in_a_lab_writes_a_report(tmp_path: Path) -> None:
    words = ["--hosts", "2", "--link", "200mbit", "--link-of", "1=100mbit", "--rounds", "2", "--target", "0.01"]
    ran = laconic("compare", *JOB, *words, "--scheme", "dense", "--scheme", "bf16", "--out", str(tmp_path / "out"))
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["rows"]
    for row, payload in zip(rows, (4, 2), strict=True):
        assert row["bytes_out"] == payload * 1_199_882
        assert 1 <= row["link_bytes_out"] / row["bytes_out"] < 1.5  # 1.07, and what TCP sends again
        assert 0 < row["link_use"] < 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{rows[0]['step_ms']:.1f}" in page
    again = laconic("report", str(tmp_path / "out"))
    assert again.returncode == 0 and (tmp_path / "out" / "report.html").read_text() == page
    assert not [lab for lab in labs() if lab.is_abandoned]


def test_a_slow_host_sleeps_by_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "process_time", iter([1.0, 1.25]).__next__)
    monkeypatch.setenv("LACONIC_SLOWDOWN", "4")
    with slowed():
        assert not slept
    assert slept == [0.75]


def test_a_failure_on_a_host_is_one_line() -> None:
    ran = laconic("train", *JOB, "--hosts", "2", "--batch", "100000")
    assert ran.returncode == 2 and ran.stdout == ""
    *ranks, last = ran.stderr.splitlines()
    assert last == "laconic: a host of the lab ended with exit code 1; all were stopped"
    ranks = [line for line in ranks if "could not be set to cubic" not in line]  # where the kernel gives another TCP
    assert ranks and all(line.startswith("laconic: rank") for line in ranks), ran.stderr


@pytest.mark.slow
def test_launchers_on_hosts_of_their_own_find_each_other() -> None:
    """As on a cluster, where PET_NNODES and the like say who is who."""
    train = [sys.executable, "-m", "laconic", "train", "--workers", "1", "--steps", "2", "--batch", "4", "--json"]
    ran = laconic("lab", "run", "--hosts", "2", "--", *train)
    assert ran.returncode == 0, ran.stderr
    (result,) = (line for line in ran.stdout.splitlines() if line.startswith("[0] {"))
    assert json.loads(result.removeprefix("[0] "))["bytes_out"] > 0


@pytest.mark.parametrize(
    "words,said",
    [
        (["train", "--link", "100mbit"], "give --hosts too"),
        (["train", "--hosts", "0"], "give 1 to"),
        (["train", "--hosts", "2", "--link", "fast"], "write one like 10mbit"),
        (["compare", "--hosts", "2", "--link-of", "7=10mbit"], "the hosts are 0 to 1"),
        (["compare", "--rounds", "0"], "--rounds is 0"),
        (["train", "--hosts", "2", "--slow", "2=4"], "hosts are 0 to 1"),
        (["train", "--hosts", "2", "--slow", "1=0.5"], "give 1 to"),
        (["train", "--hosts", "2", "--slow", "1"], "like 3=4"),
        (["train", "--slow", "1=4"], "give --hosts too"),
    ],
)
def test_a_wrong_lab_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    talk = capsys.readouterr().err
    assert said in talk and len(talk.splitlines()) == 1


SHARDED = """\
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
for module in (*model, model):
    fully_shard(module, mesh=mesh["shard"])
session = laconic.attach(model, sys.argv[1], group=mesh.get_group("replicate"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wire = Path("/sys/class/net/eth0/statistics/tx_bytes")
dist.barrier()
before = int(wire.read_text())
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
dist.barrier()
sent = int(wire.read_text()) - before
print(f"{dist.get_rank() // 2} of {session.stats().bytes_out} sent {sent};")
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", ["bf16", "topk:rho=0.05"])
def test_between_nodes_of_shards_goes_what_is_counted(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What FSDP2 says inside a node stays there."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", str(script), text]
    with Lab.create(LabSpec(2)) as lab:
        assert run(lab, torchrun, []) == 0
    # Lines of two processes may run into each other.
    told = [[*map(int, found)] for found in re.findall(r"(\d+) of (\d+) sent (\d+);", capfd.readouterr().out)]
    assert len(told) == 4
    for node in (0, 1):
        counted = sum(bytes_out for place, bytes_out, _ in told if place == node)
        sent = max(sent for place, _, sent in told if place == node)
        assert 1 <= sent / counted < 1.1  # headers and acknowledgements
