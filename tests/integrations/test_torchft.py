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


def go_on(group: Group, among: list[Group]) -> None:
    """Wait until a group is further."""
    before = group.round
    wait_until(lambda: group.round > before or group.process.poll() is not None)
    assert group.round > before and group.process.poll() is None, ends_of(among)


def ends_of(groups: list[Group]) -> str:
    """What each has printed last, and how it ended."""
    return "\n".join(f"{group.printed.name}, {group.process.poll()}: {group.text[-1000:]}" for group in groups)


def test_groups_that_are_killed_or_stopped_end_with_the_model_of_the_others(tmp_path: Path) -> None:
    assert UNTIL in SCRIPT
    script, end = tmp_path / "with_torchft.py", tmp_path / "end"
    script.write_text(SCRIPT.replace(UNTIL, ROUNDS_OF_THE_TEST.strip().format(end=str(end))))
    lighthouse = coordination.LighthouseServer("[::]:0", 2, join_timeout_ms=60_000, heartbeat_timeout_ms=1000)
    groups = [Group(script, f"group{number}", lighthouse.address()) for number in range(3)]
    try:
        first, killed, stopped = groups
        for group in groups:
            go_on(group, groups)
        killed.process.kill()
        go_on(first, groups)
        groups.append(again := Group(script, "again", lighthouse.address()))
        go_on(again, groups)
        stopped.process.send_signal(signal.SIGSTOP)
        go_on(first, groups)
        stopped.process.send_signal(signal.SIGCONT)
        go_on(stopped, groups)
        (tmp_path / "new").write_text(str(first.round + 500))
        (tmp_path / "new").rename(end)
        assert [group.process.wait(timeout=120) for group in groups] == [0, -signal.SIGKILL, 0, 0], ends_of(groups)
    finally:
        for group in groups:
            group.process.kill()
            group.process.wait()
        lighthouse.shutdown()
    ends = [re.findall(r"ends with (\w+), .* num_participants=(\d)", group.text) for group in (first, stopped, again)]
    assert len({digest for [(digest, _)] in ends}) == 1 and {number for [(_, number)] in ends} == {"3"}
