"""One command on every host at once: output marked by host, signals passed on, the worst exit code."""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TextIO

from laconic_lab.network.lab import Lab

_RUNGS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_POLL_S = 0.02
_PIPE_TIMEOUT_S = 10  # a busy machine may take a second to copy the last lines
_writing = threading.Lock()


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP are only noted in the list, so that they cannot break off a clean-up."""
    noted: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup wants it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: noted.append(got)) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    lab: Lab,
    argv: Sequence[str],
    signals: list[int],
    *,
    env: Mapping[str, str] | None = None,
    marked: bool = True,
    grace_s: float = 5.0,
    verdict: Callable[[Sequence[int | None]], int] | None = None,
) -> int:
    """Run `argv` on every host to its end; the worst exit code, or 128 + the first of `signals`.

    Lines of output are `marked` with the number of their host. `verdict` makes one exit code of those of all hosts,
    None for one that still runs, where it is not the worst that counts.

    A noted signal is passed on, and followed by SIGTERM and SIGKILL `grace_s` apart; so are the other hosts ended
    `grace_s` after one has failed.
    """
    mark = secrets.token_hex(8)
    # Python holds back what it prints to a pipe until 8 kB are full; lines should come live.
    env = {**(env or {}), "LACONIC_RUN": mark, "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    processes = [host.popen(argv, env=env, stdout=pipe, stderr=pipe) for host in lab.hosts]
    pumps = [
        pump
        for host, process in zip(lab.hosts, processes, strict=True)
        for pump in _pumps(f"[{host.index}] " if marked else "", process, signals)
    ]
    try:
        worst = _wait(processes, signals, grace_s, verdict or _worst)
    finally:
        for host in lab.hosts:
            host.kill(f"LACONIC_RUN={mark}")  # what a command left behind; the rest of a standing lab goes on
        for process in processes:
            process.wait()
        for pump in pumps:
            pump.join(timeout=_PIPE_TIMEOUT_S)  # a daemon that hides its environment may hold the pipe open
    return 128 + signals[0] if signals else worst


def _wait(
    processes: Sequence[subprocess.Popen[str]],
    signals: list[int],
    grace_s: float,
    verdict: Callable[[Sequence[int | None]], int],
) -> int:
    """Wait for all; the worst exit code among those that ended before any was told to."""
    heeded = 0
    rung = 0
    due = math.inf
    was_signalled = False
    worst = 0
    while running := [process for process in processes if process.poll() is None]:
        now = time.monotonic()
        worst = worst if was_signalled else verdict([process.returncode for process in processes])
        if len(signals) > heeded:  # a second Ctrl-C does not wait for the grace
            heeded = len(signals)
            due = now
            rung = max(rung, 0 if signals[-1] == signal.SIGINT else 1)
        elif worst and due == math.inf:
            rung = 1
            due = now + grace_s
        if now >= due:
            for process in running:
                os.killpg(process.pid, _RUNGS[min(rung, 2)])
            rung = rung + 1
            due = now + grace_s
            was_signalled = True
        time.sleep(_POLL_S)
    return worst if was_signalled else verdict([process.returncode for process in processes])


def _worst(codes: Sequence[int | None]) -> int:
    return max((code if code >= 0 else 128 - code for code in codes if code is not None), default=0)


def _pumps(mark: str, process: subprocess.Popen[str], signals: list[int]) -> list[threading.Thread]:
    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    pumps = [
        threading.Thread(target=_pump, args=(mark, source, sink, signals), daemon=True)
        for source, sink in pairs
        if source is not None
    ]
    for pump in pumps:
        pump.start()
    return pumps


def _pump(mark: str, source: IO[str], sink: TextIO, signals: list[int]) -> None:
    """Copy lines, a progress bar's carriage returns counting as line ends, until the last writer is gone."""
    for text in (line.rstrip("\n") for line in source):
        if signals and not mark:
            continue  # how each process dies of Ctrl-C; the caller, who speaks for all, says it in one line
        try:
            with _writing:
                print(f"{mark}{text}", file=sink, flush=True)
        except BrokenPipeError:  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())
            signals.append(signal.SIGPIPE)
