"""`laconic train --scheme gossip...`: records, resume, a comparison, and a host of the lab that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tests.cli.test_cli import SMALL, Started, laconic
from laconic_lab.errors import LabError
from laconic_lab.network import netlink

try:
    netlink.require()
    MISSING = ""
except LabError as error:
    MISSING = str(error)

EXACT = "gossip:mode=matched,rate=0.5"


@pytest.mark.slow
def test_a_gossip_leaves_records_and_a_resumed_one_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    one = laconic("train", *SMALL, "--scheme", EXACT, "--out", str(whole), "--json")
    # The learning rate belongs to the whole run, so its first half is a run that is killed.
    first = Started(tmp_path, "train", *SMALL, "--scheme", EXACT, "--out", str(halves))
    first.wait_until(lambda: any(halves.glob("checkpoint/step-?")))
    os.killpg(first.pid, signal.SIGKILL)
    first.end()
    two = laconic("train", *SMALL, "--scheme", EXACT, "--out", str(halves), "--json", "--resume")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    a, b = (json.loads(ran.stdout) for ran in (one, two))
    assert all(a[key] == b[key] for key in ("loss", "accuracy", "worst_accuracy", "steps"))
    for rank in (0, 1):
        parts = [folder / "checkpoint" / "step-6" / f"rank-{rank}.pt" for folder in (whole, halves)]
        models = [torch.load(part, weights_only=True)["model"] for part in parts]
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    middle = next(fact for fact in _facts(whole) if fact["kind"] == "eval" and fact["step"] == 3)
    assert 0 <= middle["worst_accuracy"] <= 1 and middle["consensus_distance"] > 0 and middle["alive"] == 2


@pytest.mark.slow
def test_compare_draws_gossip_with_its_worst_replica(tmp_path: Path) -> None:
    ran = laconic("compare", *SMALL, "--scheme", "gossip-every", "--out", str(tmp_path / "out"))
    assert ran.returncode == 0, ran.stderr
    assert "worst replica" in ran.stdout and "gossip-every" in (tmp_path / "out" / "report.html").read_text()
    (row,) = [fact for fact in _facts(tmp_path / "out") if fact["kind"] == "row"]
    assert 0 < row["worst_accuracy"] < 1 and row["consensus_distance"] > 0  # before the last average
    assert row["bytes_out"] > 2 * 4 * 1_199_882 and row["link_use"] is None  # each asks and answers at every step


def _facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.slow
def test_the_others_outlive_a_host_that_is_killed(tmp_path: Path) -> None:
    job = ["--steps", "40", "--batch", "4", "--eval-every", "40", "--scheme", "gossip-period:steps=2", "--json"]
    running = Started(tmp_path, "train", *job, "--hosts", "3", "--link", "100mbit", "--out", str(tmp_path / "out"))
    records = tmp_path / "out" / "records.jsonl"
    running.wait_until(lambda: records.exists() and records.read_text().count('"kind": "step"') >= 5)
    victim = [pid for pid in _descendants(running.pid) if _variable(pid, "LACONIC_HOST") == "2"]
    os.kill(victim[-1], signal.SIGKILL)
    ran = running.end()
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["steps"] == 40
    assert [fact for fact in _facts(tmp_path / "out") if fact["kind"] == "eval"][-1]["alive"] == 2
    assert all(line.startswith(("laconic: ", "gossip-period")) for line in ran.stderr.splitlines()), ran.stderr


def _descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in tasks for child in path.read_text().split()]
    return children + [grandchild for child in children for grandchild in _descendants(child)]


def _variable(pid: int, name: str) -> str:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((one.decode().partition("=")[2] for one in environment if one.startswith(f"{name}=".encode())), "")
