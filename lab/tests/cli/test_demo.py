"""The first command of a newcomer: a bound on time, a speed-up that is at least so much, and a sentence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from laconic import cli
from laconic_lab.cli import compare as command
from laconic_lab.compare import compare, conclusion, round_of
from laconic_lab.errors import LabError, TaskError
from laconic_lab.figures import MEASURES
from laconic_lab.network import netlink
from laconic_lab.records import Recorder
from laconic_lab.report import write_report
from laconic_lab.train import Job, work_in_process
from laconic_lab.train.result import Result


def test_a_run_ends_with_its_time_and_is_judged_then(few_images: Path) -> None:
    told: list[Result] = []
    job = Job(in_process=True, workers=2, steps=50, batch=4, max_seconds=1e-6, scheme="topk:rho=0.1", data=few_images)
    assert work_in_process(job, told.append, lambda _: None) == 0
    assert told[0].is_out_of_time and told[0].steps == 1 and told[0].accuracy > 0
    with pytest.raises(TaskError, match="leave --max-seconds out"):
        Job(scheme="gossip", max_seconds=30)


def _records(out: Path) -> None:
    """bf16 has 30 s and comes to 60 %; topk comes to 80 % in 4 of its 6."""
    with Recorder(out) as records:
        facts: dict[str, Any] = {
            "task": "fashion-mnist",
            "model": None,
            "workers": 2,
            "hosts": 2,
            "link": "10mbit",
            "link_of": {},
        }
        records.write("comparison", **facts, steps=60, batch=32, seed=0, rounds=1, target=0.7)
    for scheme, num_bytes, seconds, accuracy in (("bf16", 6300, 30.0, 0.6), ("topk", 100, 6.0, 0.8)):
        with Recorder(round_of(out, scheme, 1)) as records:
            for part in (0.5, 2 / 3, 1):
                judged = {"accuracy": accuracy if part > 0.5 else 0.1, "loss": 1.0}
                records.write("eval", step=round(6 * part), seconds=seconds * part, bytes_out=num_bytes, **judged)
            records.write("step", step=1, ms=1.0, exchange_ms=1.0)
            result: dict[str, Any] = {"split_ms": {"select": 0.0, "encode": 0.0}, "steps": 1, "seconds": seconds}
            sent = {"bytes_out": num_bytes, "bytes_in": num_bytes, "ratio": 2.0}
            records.write("result", diverged_at=None, is_out_of_time=scheme == "bf16", **result, **judged, **sent)


def test_what_had_no_time_left_took_more_than_it_had(tmp_path: Path) -> None:
    _records(tmp_path)
    found = compare(tmp_path, ["bf16", "topk"], 1, MEASURES["accuracy"], 0.7)
    bf16, topk = found.rows
    assert (bf16.seconds_to_target, bf16.seconds_more_than) == (None, 30.0)
    assert (topk.speedup_bf16, topk.speedup_bf16_more_than) == (None, 7.5)
    assert "> 30.0" in command.table_of(found) and "> 7.50x" in command.table_of(found)
    said = conclusion(found, is_timed=True).replace("\N{NO-BREAK SPACE}", " ")
    assert said == "topk reached 70 % more than 7.5x sooner than bf16, sending 63x fewer bytes"
    with Recorder(tmp_path, keeps_old=True) as records:
        for row in found.rows:
            records.write("row", **row.as_dict())
    page = write_report(tmp_path).read_text()
    assert "&gt; 7.50x" in page and "&gt; 30.0" in page


def test_without_links_there_is_no_speed_up(tmp_path: Path) -> None:
    _records(tmp_path)
    found = compare(tmp_path, ["bf16", "topk"], 1, MEASURES["accuracy"], 0.7, is_timed=False)
    for row in found.rows:
        assert row.seconds_to_target is row.seconds_more_than is row.speedup_bf16_more_than is None
    assert conclusion(found, is_timed=False) == (
        "topk sent 63x fewer bytes than bf16, and came to 80.00 % where bf16 came to 60.00 %"
    )
    assert conclusion(compare(tmp_path, ["topk"], 1, MEASURES["accuracy"], 0.7), is_timed=True) == ""


@pytest.mark.parametrize("missing", ["", "a lab needs Linux"])
def test_the_demo_runs_in_a_lab_where_it_can(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[argparse.Namespace, bool]] = []

    def require() -> None:
        if missing:
            raise LabError(missing)

    def run(words: argparse.Namespace, *, is_timed: bool) -> int:
        asked.append((words, is_timed))
        words.out.rmdir()
        return 0

    monkeypatch.setattr(netlink, "require", require)
    monkeypatch.setattr(command, "run", run)
    assert cli.main(["demo"]) == 0
    ((words, is_timed),) = asked
    assert (words.hosts, is_timed) == ((None, False) if missing else (2, True))
    assert words.scheme == ["bf16", "topk:rho=0.01"] and words.max_seconds == 30
    assert ("bytes and accuracy alone" in capsys.readouterr().err) == bool(missing)
