"""`laconic train --scheme streaming...`: virtual workers and processes, resume, and a worker that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tests.cli.test_cli import SMALL, Started, laconic

STREAMING = "streaming:every=4,fragments=2,delay=2"
SERVED = "scheme:quantize=bf16,exchange=server,trigger=rounds(every=2,fragments=2,delay=1)"


@pytest.mark.slow
def test_virtual_workers_train_as_processes_do() -> None:
    ran = [laconic("train", *SMALL, "--scheme", STREAMING, "--json", *more) for more in ([], ["--in-process"])]
    over_processes, virtual = (json.loads(one.stdout.splitlines()[-1]) for one in ran)
    assert virtual["loss"] == pytest.approx(over_processes["loss"], rel=1e-4)
    assert virtual["bytes_out"] == over_processes["bytes_out"]
    assert over_processes["waited_s"] >= 0 and over_processes["mean_step_ms"] > 0


@pytest.mark.slow
def test_a_resumed_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    one = laconic("train", *SMALL, "--scheme", STREAMING, "--out", str(whole), "--json")
    first = Started(tmp_path, "train", *SMALL, "--scheme", STREAMING, "--out", str(halves))
    first.wait_until(lambda: any(halves.glob("checkpoint/step-?")))
    os.killpg(first.pid, signal.SIGKILL)
    first.end()
    two = laconic("train", *SMALL, "--scheme", STREAMING, "--out", str(halves), "--json", "--resume")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    for rank in (0, 1):
        parts = [folder / "checkpoint" / "step-6" / f"rank-{rank}.pt" for folder in (whole, halves)]
        models = [torch.load(part, weights_only=True)["model"] for part in parts]
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
def test_under_a_server_the_others_outlive_a_worker_that_is_killed(tmp_path: Path) -> None:
    job = ["--steps", "40", "--batch", "4", "--eval-every", "40", "--scheme", SERVED, "--json", "--no-checkpoint"]
    running = Started(tmp_path, "train", *job, "--workers", "3", "--servers", "1", "--out", str(tmp_path / "out"))
    records = tmp_path / "out" / "records.jsonl"
    running.wait_until(lambda: records.exists() and records.read_text().count('"kind": "step"') >= 5)
    os.kill(running.workers()[3], signal.SIGKILL)  # ranks count the server first
    ran = running.end()
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["steps"] == 40 and list(result["lost_workers"]) == ["2"]
    last = [fact for fact in _facts(tmp_path / "out") if fact["kind"] == "eval"][-1]
    assert last["alive"] == 2


def _facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
