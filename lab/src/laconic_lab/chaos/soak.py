"""Training for long with random faults: whether memory, threads, sockets and open files stay what they were."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it when it is first built
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic import attach, follow
from laconic.errors import LaunchError
from laconic_lab.chaos import virtual
from laconic_lab.chaos.schedule import NUM_WORKERS, draw
from laconic_lab.train.launch import local_store, rank_variables, store_variables

_CONTEXT: Any = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["laconic_lab.chaos.soak"])
QUANTITIES = ("memory_mb", "threads", "sockets", "files")
_SAMPLE_S = 2.0
_LONGEST_PAUSE_S = 1.0
_WARM_UP = 0.2  # of the time: caches, and the allocator's arenas
_SLACK = {"memory_mb": 0.05, "threads": 0.0, "sockets": 0.0, "files": 0.0}  # share by which the last third may be above
_SLACK_MB = 8.0  # or so much, in which an allocator breathes

_SCHEMES = (
    "dense",
    "topk:rho=0.05",
    "maxnorm",
    "topk:rho=0.05,exchange=server",
    "overlap:rho=0.05",
    "gossip",
    "diloco:every=4",
)
_STEPS = 60  # under one scheme
_STEP_PAUSE_S = 0.01  # a soak shares its machine
_TIMEOUT_S = 60.0


def soak(minutes: float, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train on real processes, one of which is paused now and then, with faults on virtual workers beside them.

    The supervising process, in which virtual workers come and go, is looked at like the others.
    """
    chance = random.Random(seed)
    samples: dict[str, list[dict[str, float]]] = {}
    num_pauses = 0
    num_virtual = 0
    broken: list[str] = []
    since = time.monotonic()
    until = since + 60 * minutes
    with _ranks() as processes:
        names = {f"rank {rank}": process.pid for rank, process in enumerate(processes)}
        names["supervisor"] = os.getpid()
        while time.monotonic() < until:
            dead = [name for name, pid in names.items() if _sample(pid) is None]
            if dead:
                raise LaunchError(f"{dead[0]} ended after {time.monotonic() - since:.0f} s of soak; see what it said")
            num_pauses += _pause(chance.choice(processes).pid, chance.uniform(0.05, _LONGEST_PAUSE_S))
            case = draw(chance.randrange(2**31), "virtual")
            virtual.warm_up(case)
            broken += [f"seed {case.seed}: {promise}" for promise in virtual.check(case).broken]
            num_virtual += 1
            for name, pid in names.items():
                sampled = _sample(pid)
                if sampled is not None:
                    samples.setdefault(name, []).append(sampled)
            time.sleep(_SAMPLE_S)
    rows = [judge(name, seen_samples) for name, seen_samples in samples.items()]
    for row in rows:
        say(line_of(row))
    return {
        "minutes": minutes,
        "seconds": time.monotonic() - since,
        "pauses": num_pauses,
        "faults": num_virtual,
        "samples": len(samples["supervisor"]),
        "violations": broken + [line_of(row) for row in rows if not row["flat"]],
        "processes": rows,
    }


@contextlib.contextmanager
def _ranks() -> Iterator[Sequence[Any]]:
    """Processes that train until the end of the block."""
    store = local_store()  # for as long as they run
    common = {"OMP_NUM_THREADS": "1", **store_variables(store)}
    with tempfile.TemporaryDirectory(prefix="laconic-soak-") as folder:
        processes = [
            _CONTEXT.Process(target=train_on, args=({**common, **rank_variables(rank, NUM_WORKERS, rank)}, folder))
            for rank in range(NUM_WORKERS)
        ]
        for process in processes:
            process.start()
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _pause(pid: int, seconds: float) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        return True
    return False


def _sample(pid: int) -> dict[str, float] | None:
    """The resources that a process holds now; None where it has ended."""
    home = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (home / "status").read_text().splitlines())
        links = []
        for entry in (home / "fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(entry))
        memory_kb = float(status["VmRSS"].split()[0])
    except (OSError, KeyError):
        return None
    return {
        "memory_mb": memory_kb / 1024,
        "threads": float(status["Threads"]),
        "sockets": float(sum(link.startswith("socket:") for link in links)),
        "files": float(len(links)),
    }


def judge(name: str, samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The first third of what was seen after the warm-up, beside the last: medians, and whether it grew."""
    seen = samples[round(_WARM_UP * len(samples)) :]
    third = max(1, len(seen) // 3)
    row: dict[str, Any] = {"process": name, "flat": True}
    for quantity in QUANTITIES:
        first, last = (statistics.median(sample[quantity] for sample in part) for part in (seen[:third], seen[-third:]))
        slack = max(_SLACK[quantity] * first, _SLACK_MB if quantity == "memory_mb" else 0.0)
        row[f"{quantity} first"] = round(first, 1)
        row[f"{quantity} last"] = round(last, 1)
        row["flat"] = bool(row["flat"] and last <= first + slack)
    return row


def line_of(row: dict[str, Any]) -> str:
    """A verdict in words."""
    changes = ", ".join(f"{name} {row[f'{name} first']:g} -> {row[f'{name} last']:g}" for name in QUANTITIES)
    return f"{row['process']}: {changes}: {'flat' if row['flat'] else 'it grows'}"


def train_on(variables: dict[str, str], folder: str) -> None:
    """Train until this process is ended: a scheme of each family for some steps, then the next."""
    torch.set_num_threads(1)
    os.environ.update(variables)
    os.chdir(folder)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    while True:
        for scheme in _SCHEMES:
            _train(scheme, draw)
            dist.barrier()


def _train(scheme: str, draw: torch.Generator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    follows = scheme.startswith(("gossip", "diloco"))
    trained: nn.Module = model if follows else DistributedDataParallel(model)
    follower = follow(model, optimizer, scheme, timeout_s=_TIMEOUT_S) if follows else None
    session = None if isinstance(trained, nn.Sequential) else attach(trained, scheme, timeout_s=_TIMEOUT_S)
    for _ in range(_STEPS):
        x = torch.randn(16, 64, generator=draw)
        loss = nn.functional.cross_entropy(trained(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if follower is not None:
            follower.step()
        time.sleep(_STEP_PAUSE_S)
    if follower is not None:
        follower.average_()
        follower.close()
    if session is not None:
        session.close()
