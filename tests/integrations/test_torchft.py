"""The real torchft: replica groups that are killed, stopped and started again end with one model.

tests/test_replica_groups.py has every fault, by a manager in threads.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import wait_until

coordination = pytest.importorskip("torchft.coordination", reason="needs `pip install torchft`")

SCRIPT = (Path(__file__).parents[2] / "examples" / "with_torchft.py").read_text()
UNTIL = "while manager.current_step() < ROUNDS:"
ROUNDS_OF_THE_TEST = """
import pathlib
end = pathlib.Path({end!r})
while not end.exists() or manager.current_step() < int(end.read_text()):
"""
AT = re.compile(r" at (\d+): loss")


class Group:
    """A replica group in a process."""

    def __init__(self, script: Path, name: str, lighthouse: str) -> None:
        self.printed = script.parent / name
        variables = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        with self.printed.open("w") as out:
            self.process = subprocess.Popen([sys.executable, "-u", script], env=variables, stdout=out, stderr=out)

    @property
    def text(self) -> str:
        return self.printed.read_text()

    @property
    def round(self) -> int:
        """The last one that it has printed."""
        return int((AT.findall(self.text) or [0])[-1])

    def goes_on(self) -> None:
        """Wait until it is further."""
        before = self.round
        assert wait_until(lambda: self.round > before or self.process.poll() is not None), self.text[-2000:]
        assert self.process.poll() is None, self.text[-2000:]


def test_groups_that_are_killed_or_stopped_end_with_the_model_of_the_others(tmp_path: Path) -> None:
    assert UNTIL in SCRIPT
    script, end = tmp_path / "with_torchft.py", tmp_path / "end"
    script.write_text(SCRIPT.replace(UNTIL, ROUNDS_OF_THE_TEST.strip().format(end=str(end))))
    lighthouse = coordination.LighthouseServer("[::]:0", 2, join_timeout_ms=60_000, heartbeat_timeout_ms=1000)
    groups = [Group(script, f"group{number}", lighthouse.address()) for number in range(3)]
    try:
        first, killed, stopped = groups
        for group in groups:
            group.goes_on()
        killed.process.kill()
        first.goes_on()
        groups.append(again := Group(script, "again", lighthouse.address()))
        again.goes_on()
        stopped.process.send_signal(signal.SIGSTOP)
        first.goes_on()
        stopped.process.send_signal(signal.SIGCONT)
        stopped.goes_on()
        (tmp_path / "new").write_text(str(first.round + 500))
        (tmp_path / "new").rename(end)
        assert [group.process.wait(timeout=120) for group in groups] == [0, -signal.SIGKILL, 0, 0], again.text[-2000:]
    finally:
        for group in groups:
            group.process.kill()
            group.process.wait()
        lighthouse.shutdown()
    ends = [re.findall(r"ends with (\w+), .* num_participants=(\d)", group.text) for group in (first, stopped, again)]
    assert len({digest for [(digest, _)] in ends}) == 1 and {number for [(_, number)] in ends} == {"3"}
