"""Start the workers of a job through torchrun's own machinery."""

from __future__ import annotations

import logging
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
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig


_LAST_WORDS_S = 5.0
_POLL_S = 0.05
_TORCHRUN_CLOCK_S = 1  # torchrun notes whole seconds

# Of Ctrl-C a worker just ends: the launcher says it, and Python would print where each was, say in the import of torch.
_WORKER = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
from laconic.cli import run
run()
"""


def launch(job: Job) -> int:
    """Run `laconic train ...` in job.workers processes and wait for them all; 0, or DIVERGED.

    Like torchrun, it is one node of several where PET_NNODES and the like say so. Where workers may die, each process
    stands for itself instead: torchrun ends all of its workers when one dies.
    """
    if job.servers or (job.is_gossip and os.environ.get("PET_NNODES", "1") == "1"):
        return _launch_apart(job)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    store, config = _config(job.workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.workers)))
    logging.disable(logging.ERROR)  # torchrun's warnings about workers that end; we say it in one line ourselves
    try:
        elastic_launch(config, sys.executable)("-c", _WORKER, *job.words())
    except ChildFailedError as error:
        rank, exit_code = _first_failure(error)
        if exit_code == DIVERGED:
            return DIVERGED
        raise LaunchError(f"worker {rank} of {job.workers} ended {_how(exit_code)}; all were stopped") from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise LaunchError(f"stopped by {error.sigval.name}") from None
    finally:
        logging.disable(logging.NOTSET)
        del store
    return 0


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
    """What torch.distributed looks for in a process's environment, but for where rank 0 is."""
    return {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(local_rank)}


def store_variables(store: TCPStore) -> dict[str, str]:
    """What ranks that are all here meet by, as under torchrun: no rank makes a store of its own."""
    return {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def worker_command(job: Job) -> list[str]:
    """What a rank runs."""
    return [sys.executable, "-c", _WORKER, *job.words()]


def _launch_apart(job: Job) -> int:
    num_ranks = job.servers + job.workers
    store = local_store()
    common = store_variables(store)
    common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    processes = [
        subprocess.Popen(worker_command(job), env={**os.environ, **common, **rank_variables(rank, num_ranks, rank)})
        for rank in range(num_ranks)
    ]
    try:
        codes = _wait(processes, job)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    code = verdict(codes, job)
    if code and code != DIVERGED:
        raise LaunchError(_who(codes, job))
    return code


def local_store() -> TCPStore:
    """Where workers that are all here meet: on the loopback alone, where torch's own would listen to all the world.

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


def _wait(processes: Sequence[subprocess.Popen[bytes]], job: Job) -> list[int | None]:
    """Wait for all to end, or, once the job has failed, a while for the others to say so; their exit codes by rank."""
    deadline = math.inf
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if deadline == math.inf and verdict(codes, job):
            deadline = time.monotonic() + _LAST_WORDS_S
        time.sleep(_POLL_S)
    return codes


def _who(codes: Sequence[int | None], job: Job) -> str:
    """Which process failed, and how: one that was killed, if any, and rather a worker than its server."""
    failed = {rank: code for rank, code in enumerate(codes) if code}
    rank = min(failed, key=lambda rank: (failed[rank] > 0, rank < job.servers, rank))
    name = f"server {rank}" if rank < job.servers else f"worker {rank - job.servers} of {job.workers}"
    return f"{name} ended {_how(failed[rank])}; all were stopped"


def _config(num_workers: int) -> tuple[TCPStore | None, LaunchConfig]:
    """What torchrun is told, and the store it shall find, if all workers are here, for as long as they run."""
    from torch.distributed.launcher.api import LaunchConfig

    try:
        num_nodes = int(os.environ.get("PET_NNODES", "1"))
        place = int(os.environ["PET_NODE_RANK"]) if num_nodes > 1 else 0
        master = f"{os.environ['PET_MASTER_ADDR']}:{os.environ['PET_MASTER_PORT']}" if num_nodes > 1 else ""
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"PET_NNODES asks for several nodes, but {error}; set PET_NNODES=N, PET_NODE_RANK, PET_MASTER_ADDR and "
            "PET_MASTER_PORT, or start it with torchrun -m laconic train"
        ) from None
    store = None
    if num_nodes == 1:
        # All workers are here, so their traffic need not find its way through the machine's outer interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = local_store()
        master = f"127.0.0.1:{store.port}"
    return store, LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_workers,
        run_id="laconic" if num_nodes > 1 else f"laconic-{os.getpid()}",
        rdzv_backend="static",
        rdzv_endpoint=master,
        rdzv_configs={"rank": place},
        max_restarts=0,
        monitor_interval=0.1,
    )


def _first_failure(error: ChildFailedError) -> tuple[int, int]:
    """(rank, exit code) of the first that failed: of those at torchrun's first look one that was killed, if any.

    Its peers fail for want of it, and may do so before that look. Those whom torchrun ends then die of SIGTERM, or,
    half a minute later, of SIGKILL.
    """
    _, first = error.get_first_failure()
    at_once = {r: f.exitcode for r, f in error.failures.items() if f.timestamp <= first.timestamp + _TORCHRUN_CLOCK_S}
    own = {rank: code for rank, code in at_once.items() if code != -signal.SIGTERM} or at_once
    rank = min(own, key=lambda rank: (own[rank] > 0, error.failures[rank].timestamp))
    return rank, own[rank]


def _how(exit_code: int) -> str:
    return f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
