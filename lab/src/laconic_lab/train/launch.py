"""Start the workers of a job: a process for each rank, and one line where one of them fails."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from laconic.errors import LaunchError
from laconic_lab.train.job import Job
from laconic_lab.train.result import DIVERGED

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LAST_LINES_S = 5.0
_POLL_S = 0.05

# Of Ctrl-C a worker just ends: the launcher says it, and Python would print where each was, say in the import of torch.
_WORKER = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
from laconic.cli import run
run()
"""


def launch(job: Job) -> int:
    """Run `laconic train ...` in a process for each server and worker and wait for them all; 0, or DIVERGED.

    Like torchrun, it is one node of several where PET_NNODES and the like say so; servers are all on one.
    """
    num_here = job.servers + job.workers
    num_nodes, node, rendezvous = (1, 0, {}) if job.servers else _nodes()
    store = local_store() if num_nodes == 1 else None  # for as long as they run
    common = store_variables(store) if store is not None else rendezvous
    common["OMP_NUM_THREADS"] = threads_each(num_here)
    ranks = [rank_variables(num_here * node + place, num_here * num_nodes, place) for place in range(num_here)]
    processes = [subprocess.Popen(worker_command(job), env={**os.environ, **common, **rank}) for rank in ranks]
    try:
        codes = await_codes(processes, job)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    code = verdict(codes, job)
    if code and code != DIVERGED:
        raise LaunchError(first_failure(codes, job))
    return code


def threads_each(num_ranks: int) -> str:
    """The value of OMP_NUM_THREADS for ranks that share this machine, unless it has one."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))


def _nodes() -> tuple[int, int, dict[str, str]]:
    """(how many there are, which this is, where their first rank is) by torchrun's own variables."""
    try:
        num_nodes = int(os.environ.get("PET_NNODES", "1"))
        if num_nodes == 1:
            return 1, 0, {}
        names = {"MASTER_ADDR": "PET_MASTER_ADDR", "MASTER_PORT": "PET_MASTER_PORT"}
        return num_nodes, int(os.environ["PET_NODE_RANK"]), {name: os.environ[pet] for name, pet in names.items()}
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"PET_NNODES asks for several nodes, but {error}; set PET_NNODES=N, PET_NODE_RANK, PET_MASTER_ADDR and "
            "PET_MASTER_PORT, or start it with torchrun -m laconic train"
        ) from None


def verdict(codes: Sequence[int | None], job: Job) -> int:
    """The exit code of a job so far; `codes` are by rank, None while a process runs.

    Servers must not fail. Where they answer, or models gossip, workers may, as long as one of them comes to an end.
    """
    ended = [0 if code is None else code if code >= 0 else 128 - code for code in codes]
    must = ended[: job.servers] if job.asks_servers or job.is_gossip else ended
    if any(must) or None in codes[job.servers :]:
        return max(must, default=0)
    return min(ended[job.servers :])


def rank_variables(rank: int, num_ranks: int, local_rank: int) -> dict[str, str]:
    """The variables that torch.distributed looks for in a process's environment, but for where rank 0 is."""
    return {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(local_rank)}


def store_variables(store: TCPStore) -> dict[str, str]:
    """The variables by which ranks of one machine meet, as under torchrun: no rank makes a store of its own."""
    return {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def worker_command(job: Job) -> list[str]:
    """The command of a rank."""
    return [sys.executable, "-c", _WORKER, *job.words()]


def local_store() -> TCPStore:
    """The store at which workers of one machine meet: on the loopback alone, where torch's would listen to all.

    Their secret comes with their environment, which other users cannot read.
    """
    from torch.distributed import TCPStore

    os.environ.setdefault("LACONIC_SECRET", secrets.token_hex(16))
    link = socket.create_server(("127.0.0.1", 0))
    port = link.getsockname()[1]
    make = partial(
        TCPStore,
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=link.detach(),
    )
    try:
        return make()
    except NotImplementedError:  # in torch 2.6 its newer half takes no socket that listens already
        return make(use_libuv=False)


def await_codes(processes: Sequence[subprocess.Popen[bytes]], job: Job) -> list[int | None]:
    """Wait for all to end, or, once the job has failed, a while for the others to say so; their exit codes by rank."""
    deadline = math.inf
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if deadline == math.inf and verdict(codes, job):
            deadline = time.monotonic() + LAST_LINES_S
        time.sleep(_POLL_S)
    return codes


def first_failure(codes: Sequence[int | None], job: Job) -> str:
    """The line that names the process that failed: one that was killed, if any, and rather a worker than its server.

    Its peers fail for want of it.
    """
    failed = {rank: code for rank, code in enumerate(codes) if code}
    rank = min(failed, key=lambda rank: (failed[rank] > 0, rank < job.servers, rank))
    name = f"server {rank}" if rank < job.servers else f"worker {rank - job.servers} of {job.workers}"
    return f"{name} ended {_how(failed[rank])}; all were stopped"


def _how(exit_code: int) -> str:
    return f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
