"""Rows of several seeds: means, each seed's accuracy, and bytes beside the first scheme's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seeds import main


def test_a_row_for_each_scheme_and_case(few_images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["--case", "all labels:", "--case", "one label: --labels-per-worker 1 --batch 2"]
    schemes = ["--scheme", "gossip-every:mode=matched", "--scheme", "gossip-period:steps=50,mode=matched"]
    job = ["--data", str(few_images), "--workers", "2", "--batch", "4", "--steps", "2", "--seeds", "0,1"]
    assert main([*job, *cases, *schemes]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["case"], row["scheme"].partition(":")[0]) for row in rows] == [
        (case, scheme) for case in ("all labels", "one label") for scheme in ("gossip-every", "gossip-period")
    ]
    assert all(row["accuracy"] == pytest.approx(sum(row["accuracy by seed"]) / 2, abs=0.01) for row in rows)
    assert [row["share"] == 1 for row in rows] == [True, False, True, False]
