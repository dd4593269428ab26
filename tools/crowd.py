"""Many members at one server that come and go: whether its memory, threads and files stay as they are.

python tools/crowd.py [--seconds 1200] [--processes 16] [--virtual 64] > FILE

Real processes are killed and replaced, one every few seconds; virtual members (all in this process, over connections of
their own) leave or are dropped, and others join. Every line is a look at the server's process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

import laconic
from laconic.members import run_stats

SCHEME = "streaming:every=8,fragments=2,delay=1"
WIDTH = 128
LOOK_S, STEP_S = 10.0, 0.25


def main() -> None:
    """Print a line of JSON at each look."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=1200)
    arguments.add_argument("--processes", type=int, default=16)
    arguments.add_argument("--virtual", type=int, default=64)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("forkserver")  # a warm process, so that a member takes no seconds to begin
    context.set_forkserver_preload(["laconic", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        words = ["--listen", "127.0.0.1:0", "--scheme", SCHEME, "--wait-budget", "2", "--state", folder]
        server = subprocess.Popen(
            [sys.executable, "-m", "laconic", "serve", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            assert server.stderr is not None
            dialled = re.search(r"dial (\S+);", line := server.stderr.readline())
            assert dialled, line
            crowd = Crowd(context, dialled[1], given.processes, given.virtual)
            crowd.run(given.seconds, server.pid, Path(folder))
        finally:
            server.kill()
            server.wait()


class Walker:
    """A member whose model walks at random."""

    def __init__(self, address: str, id: str) -> None:
        self.model = nn.Linear(WIDTH, WIDTH)
        self.member = laconic.join(address, self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), id=id)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        self.member.step(tokens=32)


def _walk(address: str, id: str) -> None:
    """Be a member until killed."""
    torch.set_num_threads(1)
    walker = Walker(address, id)
    while True:
        walker.step()
        time.sleep(STEP_S)


class Crowd:
    """The members of both kinds; the oldest are replaced first."""

    def __init__(self, context: Any, address: str, num_processes: int, num_virtual: int) -> None:
        self._context = context
        self._address = address
        self._rng = random.Random(0)
        self._num_made = 0
        self._processes: list[BaseProcess] = [self._process() for _ in range(num_processes)]
        self._walkers = [self._walker() for _ in range(num_virtual)]

    def _id(self, kind: str) -> str:
        self._num_made += 1
        return f"{kind}{self._num_made}"

    def _process(self) -> BaseProcess:
        process: BaseProcess = self._context.Process(target=_walk, args=(self._address, self._id("p")), daemon=True)
        process.start()
        return process

    def _walker(self) -> Walker:
        return Walker(self._address, self._id("v"))

    def _replace(self) -> None:
        """Replace one process, which is killed, and four virtual members, of which half leave."""
        process = self._processes.pop(0)
        process.kill()
        process.join()
        process.close()
        self._processes.append(self._process())
        for number in range(4):
            walker = self._walkers.pop(0)
            if number % 2:
                walker.member.leave()
            else:
                walker.member.close()
            self._walkers.append(self._walker())

    def run(self, seconds: float, pid: int, folder: Path) -> None:
        """Let all members step, and look at the server now and then."""
        begun = looked = replaced = time.monotonic()
        try:
            while (now := time.monotonic()) < begun + seconds:
                for walker in self._walkers:
                    walker.step()
                if now > replaced + LOOK_S / 4:
                    replaced = now
                    self._replace()
                if now > looked + LOOK_S:
                    looked = now
                    print(json.dumps({"seconds": round(now - begun), **self._look(pid, folder)}), flush=True)
                time.sleep(max(0.0, now + STEP_S - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()

    def _look(self, pid: int, folder: Path) -> dict[str, float]:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        stats = run_stats(self._address)
        return {
            "members": stats["num_members"],
            "joined": self._num_made,
            "rounds": stats["rounds"],
            "rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
            "threads": int(status["Threads"]),
            "files": len(os.listdir(f"/proc/{pid}/fd")),
            "state_kib": round(sum(path.stat().st_size for path in folder.iterdir()) / 1024),
        }


if __name__ == "__main__":
    main()
