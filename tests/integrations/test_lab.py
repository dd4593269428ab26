"""In the lab each trainer sends what it counts, and trains as bare DDP does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="a lab is made by root here")]


@pytest.mark.parametrize("num_hosts", [2, 4])
@pytest.mark.parametrize("name", ["accelerate", "fabric", "lightning", "transformers"])
def test_the_interface_carries_what_is_counted(name: str, num_hosts: int) -> None:
    tools = Path(sys.executable).parent
    command = [str(tools / "laconic"), "lab", "run", "--hosts", str(num_hosts), "--"]
    command += [str(tools / "torchrun"), str(HERE / "lab_bytes.py"), name]
    here = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    ran = subprocess.run(command, env=here, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    said = re.findall(r"ratio ([\d.]+) as bare DDP (\w+)", ran.stdout)
    assert len(said) == num_hosts
    # Headers of TCP are 4 %; what a trainer says beside the exchange is small.
    assert all(same == "True" and 0.9 < float(ratio) < 1.1 for ratio, same in said), ran.stdout


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_example_sends_what_it_counts(name: str) -> None:
    """By the command that made the record of all six."""
    command = [sys.executable, str(HERE.parents[1] / "tools" / "trainers_in_lab.py"), "--trainer", name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["off at most"] < 0.1, ran.stdout
