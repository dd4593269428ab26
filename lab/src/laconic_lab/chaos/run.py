"""Fault after fault, and the promises that were broken, each with the seed that breaks it again."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laconic.errors import LaunchError
from laconic_lab.chaos import members, processes, virtual
from laconic_lab.chaos.schedule import Case, Outcome, draw
from laconic_lab.network import Lab

_SETTLE_S = 5.0
_REPORT_EVERY = 25


def chaos(
    seed: int,
    faults: int,
    *,
    on: str | None = None,
    scheme: str | None = None,
    lab: Lab | None = None,
    timeout_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Let the faults of `seed`, `seed` + 1, ... befall workers, one by one; ended early, it tells what was seen."""
    since = time.monotonic()
    violations: list[dict[str, Any]] = []
    struck: Counter[str] = Counter()
    families: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []  # of members: what was measured
    done = 0
    try:
        for number in range(seed, seed + faults):
            case = draw(number, on, scheme, hosts=len(lab.hosts) if lab else 0)
            if case.on == "members":
                outcome = members.check(case, lab)
                rows.append({"fault": str(case), "struck": outcome.struck, **outcome.measured})
            else:
                outcome = processes.check(case, timeout_s, lab) if case.on == "processes" else _on_virtual_workers(case)
            done += 1
            struck[case.on] += outcome.struck
            families[case.family] += 1
            for promise in outcome.broken:
                violations.append({"seed": number, "promise": promise, "fault": str(case)})
                say(f"seed {number} breaks a promise: {promise} ({case}, on {case.on})")
            if done % _REPORT_EVERY == 0:
                say(f"{done} faults, {len(violations)} violations, {time.monotonic() - since:.0f} s")
    except KeyboardInterrupt:
        say(f"interrupted after {done} faults")
    except LaunchError as error:  # of a machine too busy for a scheme without a fault: what was seen until then counts
        if not done:
            raise
        say(f"ended after {done} faults: {error}")
    return {
        "faults": done,
        "struck": sum(struck.values()),  # a fault drawn for a message or a phase that never came befell nobody
        "on_processes": struck["processes"],
        "families": dict(families),
        "violations": violations,
        **({"members": rows} if rows else {}),
        "seconds": time.monotonic() - since,
    }


def _on_virtual_workers(case: Case) -> Outcome:
    """Here whatever is left behind would be in this process."""
    virtual.warm_up(case)
    before = _held()
    outcome = virtual.check(case)
    until = time.monotonic() + _SETTLE_S
    while any(now > then for now, then in zip(_held(), before, strict=True)) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    if any(now > then for now, then in zip(_held(), before, strict=True)):
        outcome.broken.append(f"no thread, socket or file is left: {before} before, {_held()} after")
    return outcome


def _held() -> tuple[int, int]:
    """(threads, open files and sockets) of this process, where the system tells."""
    table = Path("/proc/self/fd")
    return threading.active_count(), len(os.listdir(table)) if table.exists() else 0
