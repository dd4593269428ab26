"""The page of where laconic was run says what was noted, and no more."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import support


def test_the_page_is_what_was_noted() -> None:
    assert support.PAGE.read_text("utf-8") == support.page(), "`python tools/support.py page` writes it anew"


def test_what_is_noted_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "NOTES", tmp_path / "support.jsonl")
    (tmp_path / "test_one.py").write_text("def test_this(): pass\n")
    (tmp_path / "test_two.py").write_text("def test_that(): assert False\n")
    assert "macOS" in support.never() and not support.noted()
    assert support.run("gloo", [str(tmp_path / "test_two.py")]) and not support.noted()
    assert support.run("gloo", [str(tmp_path / "test_one.py")]) == 0
    again = subprocess.CompletedProcess([], 0, "1 passed")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: again)  # and the commit is asked for so, too
    assert support.run("gloo", [str(tmp_path / "test_one.py")]) == 0
    (note,) = support.noted()
    assert note["passed"] == 1 and note["backend"] == "gloo" and note["date"] in support.page()
    mac = {**note, "os": "Darwin arm64"}
    support.NOTES.write_text(json.dumps(mac) + "\n")
    assert "macOS" not in support.never() and "Darwin arm64" in support.page()
