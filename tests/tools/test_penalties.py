"""Steps to a target: where a loss comes there, and what a folder of runs sums up to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penalties
from laconic_lab.records import to_json
from laconic_lab.train.planning import steps_to
from penalties import KINDS, PenaltyRun, runs, summary, target_of
from results import read_result

CNN = KINDS["cnn-sgd"]


def _write(home: Path, run: PenaltyRun, loss: Callable[[float], float], steps: int) -> None:
    """As `laconic train` would: evaluations every ten micro-steps."""
    folder = run.folder(home)
    folder.mkdir(parents=True)
    every = max(1, 10 // run.accumulate)
    facts = [
        {"kind": "eval", "step": step, "loss": loss(step * run.accumulate)}
        for step in range(0, steps // run.accumulate + 1, every)
    ]
    (folder / "records.jsonl").write_text("".join(to_json(fact) + "\n" for fact in facts))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """bf16 falls by 1 in 200 steps; topk as fast, sign half as fast, dense was cut short, dgc never comes there."""
    for seed in range(2):
        run = PenaltyRun(CNN, "bf16", 1, seed)
        _write(tmp_path, run, lambda step: 2 - step / 200, 300)
        _write(tmp_path, replace(run, accumulate=2), lambda step: 2 - step / 300, 600)
        _write(tmp_path, replace(run, scheme="dense"), lambda step: 2 - step / 200, 100)
        _write(tmp_path, replace(run, scheme="topk:rho=0.01"), lambda step: 2 - step / 200, 220)
        _write(tmp_path, replace(run, scheme="dgc:rho=0.01"), lambda step: 2.0, 600)
    _write(tmp_path, PenaltyRun(CNN, "sign", 1, 0), lambda step: 2 - step / 400, 600)
    _write(tmp_path, PenaltyRun(CNN, "sign", 1, 1), lambda step: 2.0 if step < 50 else math.nan, 50)
    return tmp_path


def test_a_target_is_reached_between_two_evaluations() -> None:
    losses = [(0, 4.0), (10, 3.0), (20, 2.0), (30, 1.0), (40, 0.0)]
    assert steps_to(1.5, losses) == pytest.approx(25)
    assert steps_to(0.5, losses) is None  # the last evaluation has no neighbour yet
    assert steps_to(3.5, losses) == 10  # the first that has neighbours


def test_one_low_evaluation_is_not_there() -> None:
    assert steps_to(1.5, [(0, 3.0), (10, 3.0), (20, 1.0), (30, 3.0), (40, 3.0)]) is None


def test_the_target_waits_for_all_seeds(home: Path) -> None:
    assert target_of(CNN, range(2), home) == pytest.approx(1.0)
    assert target_of(CNN, range(3), home) is None


def test_a_folder_sums_up(home: Path) -> None:
    rows = {(row["scheme"], row["accumulate"]): row for row in summary([CNN], range(2), home)}
    assert rows["bf16", 1]["factor"] == 1 and rows["topk:rho=0.01", 1]["steps"] == pytest.approx([200, 200])
    assert rows["bf16", 2]["factor"] == pytest.approx(1.5)  # in micro-steps
    assert rows["dgc:rho=0.01", 1]["steps"] == [None, None] and rows["dgc:rho=0.01", 1]["factor_low"] is None
    sign = rows["sign", 1]
    assert sign["factor_low"] == pytest.approx(2) and sign["factor_high"] is None
    assert ("dense", 1) not in rows and ("gossip", 1) not in rows


def test_what_is_there_is_not_run_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(penalties.subprocess, "Popen", Process)
    for run in (
        PenaltyRun(CNN, scheme, 1, seed) for scheme in ("bf16", "topk:rho=0.01", "dgc:rho=0.01") for seed in range(2)
    ):
        penalties.train(run, home=home, data=None, device="cpu", seeds=range(2), deadline=math.inf)
    penalties.train(
        PenaltyRun(CNN, "dgc:rho=0.01", 1, 2), home=home, data=None, device="cpu", seeds=range(2), deadline=math.inf
    )
    assert not started  # of dgc two seeds have failed
    penalties.train(
        PenaltyRun(CNN, "dense", 1, 0), home=home, data=None, device="cpu", seeds=range(2), deadline=math.inf
    )
    assert len(started) == 1 and "dense" in started[0]


def test_every_run_is_a_job_and_bf16_comes_first(tmp_path: Path) -> None:
    made = list(runs(list(KINDS.values()), range(1)))
    assert all(run.job(tmp_path, tmp_path / "text", "cpu").schedule == "constant" for run in made)
    assert made[0].is_base and made[1].is_base
    larger = PenaltyRun(KINDS["gpt-tiny-adamw"], "bf16", 4, 0).job(tmp_path, tmp_path / "text", "cpu")
    assert (larger.batch, larger.accumulate) == (64, 4) and larger.lr == pytest.approx(2e-3)


def test_the_record_names_the_machine_that_ran(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "RESULTS", home / "results")
    (home / "about.json").write_text(json.dumps({"machine": "another", "command": "penalties run"}))
    assert penalties.main(["summarize", str(home), "--kind", "cnn-sgd", "--seeds", "2"]) == 0
    record = read_result(home / "results" / "steps-to-target.json")
    assert record["machine"] == "another" and len(record["rows"]) == 5
