"""Runs while they go: a view on a terminal, and a page that grows."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import termios
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from laconic import cli
from laconic_lab.cli import compare as command
from laconic_lab.cli.live import PageSoFar, Runs, Tail, frame, open_in_browser
from laconic_lab.compare import round_of
from laconic_lab.errors import TaskError
from laconic_lab.figures import MEASURES
from laconic_lab.records import Recorder
from laconic_lab.train import Job
from tests.workers import exit_code, start_laconic

SMALL = ["--in-process", "--workers", "2", "--steps", "4", "--batch", "4", "--eval-every", "2"]
REFRESH = 'http-equiv="refresh"'
SETTING: dict[str, Any] = {
    "task": "fashion-mnist", "model": None, "workers": 2, "hosts": None, "link": None, "link_of": {}, "steps": 4,
    "batch": 4, "seed": 0, "rounds": 2, "target": None, "measure": "accuracy",
}  # fmt: skip


def _records(folder: Path, steps: int, *, link: bool = False) -> Recorder:
    records = Recorder(folder)
    records.write("job", scheme="dense")
    records.write("eval", step=0, seconds=0.0, accuracy=0.1, loss=2.3, bytes_out=0)
    for step in range(1, steps + 1):
        parts = {f"{phase}_ms": 1.0 for phase in ("select", "encode", "exchange", "decode")}
        seen = {"link_bytes_out": 12_500} if link else {}
        records.write("step", step=step, loss=2.0 / step, ms=10.0, bytes_out=10_000, bytes_in=10_000, **parts, **seen)
    return records


def _text(shown: Any, width: int = 100) -> str:
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as caught:
        console.print(shown)
    return caught.get()


def test_a_view_tells_steps_worth_bytes_and_link(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    tail = Tail(tmp_path)
    tail.read()
    assert not tail.steps
    runs = Runs({"dense": [tmp_path], "topk": [tmp_path / "later"]}, 20, MEASURES["accuracy"], 20_000_000)
    tails = {"dense": [tail], "topk": [Tail(tmp_path / "later")]}
    with _records(tmp_path, 5, link=True) as records:
        tail.read()
        shown = _text(frame(runs, tails, 100))
        assert re.search(r"dense +━+ +5/20 +10.00 % +10 kB/step +link 50%", shown)  # 12,500 bytes in 10 ms of 20 Mbit/s
        assert re.search(r"topk +0/20", shown) and "train loss of dense: 0.400" in shown
        records.write("eval", step=5, seconds=0.05, accuracy=0.5, loss=1.0, bytes_out=50_000)
        tail.read()
        assert "50.00 %" in _text(frame(runs, tails, 60), 60)
    unknown = Runs(runs.folders, 20, MEASURES["accuracy"])
    assert "1.25 MB/s" in _text(frame(unknown, tails, 100))


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    with (tmp_path / "records.jsonl").open("w") as file:
        file.write(json.dumps({"kind": "eval", "step": 0})[:9])
        file.flush()
        tail.read()
        assert not tail.evaluations
        file.write(json.dumps({"kind": "eval", "step": 0})[9:] + "\n")
        file.flush()
        tail.read()
        assert tail.evaluations == [{"kind": "eval", "step": 0}]
    with _records(tmp_path, 3):
        pass
    tail.read()  # written over, as by a resumed run, it begins anew
    tail.read()
    assert len(tail.steps) == 3
    (tmp_path / "records.jsonl").write_text(json.dumps({"kind": "eval", "step": 7}) + "\n")
    tail.read()
    assert [fact["step"] for fact in tail.evaluations] == [7] and not tail.steps


def test_a_page_grows_while_runs_go_on(tmp_path: Path) -> None:
    page = PageSoFar(tmp_path, SETTING, ["dense", "topk"], None)
    path = page.write("Running.")
    assert path is not None and REFRESH in (first := path.read_text()) and "<svg" not in first
    with _records(round_of(tmp_path, "dense", 1), 2) as records:
        records.write("eval", step=2, seconds=0.02, accuracy=0.375, loss=2.0, bytes_out=20_000)
        assert page.write("Running.") == path and "<svg" not in path.read_text()  # it has not ended yet
        sent = {"bytes_out": 20_000, "bytes_in": 20_000, "ratio": 1.0, "split_ms": {"select": 1.0, "encode": 1.0}}
        records.write("result", steps=2, accuracy=0.375, loss=2.0, diverged_at=None, **sent)
    page.write("Running: topk (2 of 2, round 1 of 2).")
    shown = path.read_text()
    assert "37.50 %" in shown and "<svg" in shown and REFRESH in shown and "Running: topk (2 of 2" in shown
    page.write("Broken off: topk.", is_running=False)
    broken = path.read_text()
    assert REFRESH not in broken and "Broken off: topk" in broken and "37.50 %" in broken
    assert [one.name for one in tmp_path.glob("report*")] == ["report.html"]


@pytest.mark.slow  # a whole comparison; the page itself is tested above
def test_the_page_of_a_comparison_is_loaded_again_until_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = []
    write = PageSoFar.write

    def noted(self: PageSoFar, state: str, *, is_running: bool = True) -> Path | None:
        path = write(self, state, is_running=is_running)
        pages.append(path.read_text() if path else "")
        return path

    monkeypatch.setattr(PageSoFar, "write", noted)
    out = tmp_path / "out"
    assert cli.main(["compare", *SMALL, "--scheme", "dense", "--scheme", "topk:rho=0.1", "--out", str(out)]) == 0
    assert pages and all(REFRESH in page for page in pages) and "topk:rho=0.1" in pages[-1]
    assert REFRESH not in (out / "report.html").read_text()

    def fails(job: Job, *_: object) -> int:
        raise TaskError("no more")

    monkeypatch.setattr("laconic_lab.cli.jobs.work_in_process", fails)
    assert cli.main(["compare", *SMALL, "--scheme", "dense", "--out", str(tmp_path / "broken")]) == 2
    assert REFRESH not in pages[-1] and "Broken off: dense (1 of 1, round 1 of 1)." in pages[-1]


@pytest.mark.parametrize("has_browser", [True, False])
def test_a_page_is_opened_or_its_place_told(
    has_browser: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def note(place: str) -> bool:
        opened.append(place)
        return True

    monkeypatch.setattr(webbrowser, "open", note)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if has_browser:
        monkeypatch.setenv("DISPLAY", ":0")
    open_in_browser(tmp_path / "report.html")
    told = capsys.readouterr().err
    assert opened == ([(tmp_path / "report.html").as_uri()] if has_browser else [])
    assert told == (
        "" if has_browser else f"laconic: no browser can be opened here; the page is {tmp_path}/report.html\n"
    )
    with pytest.raises(TaskError, match="--open shows the page of a comparison; give --out DIR too"):
        command.run(_asked("compare", "--open"))


def _asked(*words: str) -> argparse.Namespace:
    return cli.all_commands().parse_args(list(words))


def _on_a_terminal(folder: Path, *words: str) -> tuple[str, str]:
    """(stdout, what a terminal of 100 columns was sent)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    printed = folder / "printed"
    process = start_laconic(*words, out=printed, err=Path(os.ttyname(theirs)), TERM="xterm", OMP_NUM_THREADS="1")
    sent = os.read(ours, 1)  # by now they have opened it
    os.close(theirs)
    with suppress(OSError):  # Linux says so where the last writer is gone
        while part := os.read(ours, 65_536):
            sent += part
    os.close(ours)
    assert exit_code(process) == 0, sent.decode()
    return printed.read_text(), sent.decode()


def test_a_terminal_shows_a_run_and_its_workers_leave_it_to_that(tmp_path: Path, few_images: Path) -> None:
    pytest.importorskip("rich")
    words = ["--workers", "2", "--steps", "4", "--batch", "4", "--eval-every", "2", "--data", str(few_images)]
    printed, sent = _on_a_terminal(tmp_path, "train", *words, "--scheme", "dense")
    assert printed.startswith("dense: accuracy ") and printed.count("\n") == 1
    assert "4/4" in sent and "B/s" in sent and "train loss of dense" in sent
    assert "dense: step" not in sent  # a worker's own line


@pytest.mark.slow  # two more runs of what is tested above, and what they print meanwhile
def test_a_terminal_shows_a_comparison_and_what_is_printed_above_it(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    out = tmp_path / "out"
    schemes = ("--scheme", "dense", "--scheme", "topk:rho=0.1")
    printed, sent = _on_a_terminal(tmp_path, "compare", *SMALL, *schemes, "--rounds", "2", "--out", str(out), "--open")
    assert "vs dense" in printed and sent.count("8/8") >= 2 and "(1 of 2, round" not in sent
    assert f"no browser can be opened here; the page is {out}/report.html" in sent
    assert f"laconic: wrote {out}/report.html" in sent
