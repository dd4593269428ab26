"""MPS is started where workers share a GPU, and quit; where it does not start, it is said, and training goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from laconic_lab.cli import jobs as launching
from laconic_lab.train import Job, mps
from laconic_lab.train.mps import uses_mps

CUDA = Job(device="cuda", workers=2)
CONTROL = """#!/bin/sh
asked="$*$(cat)"
echo "$asked" >>"{log}"
[ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && [ -z "$CUDA_VISIBLE_DEVICES" ] || exit 9
case "$asked" in
  -d) {start} ;;
  get_server_list) {servers} ;;
esac
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One GPU, and a control program that starts; the file where it notes what it is asked."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for name in mps.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(mps, "CLIENT", "")
    control(tmp_path)
    return tmp_path / "asked"


def control(folder: Path, start: str = ":", servers: str = "echo 4711") -> None:
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(CONTROL.format(log=folder / "asked", start=start, servers=servers))
    program.chmod(0o755)


def launched(job: Job, monkeypatch: pytest.MonkeyPatch) -> str:
    """What workers of the job find in their environment."""
    found: list[str] = []
    look = [sys.executable, "-S", "-c", "import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY', ''))"]

    def launch(job: Job) -> int:
        found.append(subprocess.run(look, capture_output=True, text=True, check=True).stdout.strip())
        assert uses_mps(job) == bool(found[0])
        return 0

    monkeypatch.setattr(launching, "launch", launch)
    with launching.launcher(None) as start:
        assert start(job) == 0
    assert not uses_mps(job)
    return found[0]


def test_workers_that_share_a_gpu_find_mps_and_it_is_quit(
    asked: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = launched(CUDA, monkeypatch)
    assert Path(folder).name.startswith("laconic-mps-") and not Path(folder).exists()
    assert asked.read_text().splitlines() == ["-d", "get_server_list", "quit -t 5"]
    assert capfd.readouterr().err == ""


def test_it_is_quit_after_an_error_too(asked: Path) -> None:
    with pytest.raises(ZeroDivisionError), mps.shared_gpu(CUDA, 2, print):
        _ = 1 / 0
    assert asked.read_text().splitlines()[-1] == "quit -t 5"
    assert not uses_mps(CUDA)


@pytest.mark.parametrize(
    ("start", "servers", "client", "reason", "is_quit"),
    [
        ("echo no permission; exit 1", "", "", "nvidia-cuda-mps-control: no permission", False),
        (":", "echo 4711", "import sys; sys.exit('CUDA error 805')", "CUDA error 805", True),
        (":", ":", "", "a process ran on the GPU without it", True),
    ],
)
def test_where_it_does_not_start_it_is_said_in_one_line(
    asked: Path,
    start: str,
    servers: str,
    client: str,
    reason: str,
    is_quit: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    control(asked.parent, start, servers)
    monkeypatch.setattr(mps, "CLIENT", client)
    assert launched(CUDA, monkeypatch) == ""
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("laconic: the workers take turns on the GPU") and line.endswith(reason)
    assert ("quit" in asked.read_text()) == is_quit


def test_where_there_is_no_mps_it_is_said(
    asked: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(asked.parent / "empty"))
    assert launched(CUDA, monkeypatch) == ""
    assert "nvidia-cuda-mps-control: No such file or directory" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("job", "num_gpus"),
    [(CUDA, 2), (CUDA, 0), (Job(device="cuda", workers=1), 1), (Job(workers=4), 1)],
    ids=["a GPU each", "no GPU", "one worker", "cpu"],
)
def test_who_needs_none_starts_none(asked: Path, job: Job, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert launched(job, monkeypatch) == ""
    assert not asked.exists()


def test_one_that_runs_already_is_used(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    with mps.shared_gpu(CUDA, 2, print):
        assert uses_mps(CUDA)
    assert uses_mps(CUDA) and not asked.exists()
