"""Start the workers of a job through torchrun's own machinery."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from laconic.errors import LaunchError
from laconic.train.job import Job
from laconic.train.result import DIVERGED

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


# Of Ctrl-C a worker just ends: the launcher says it, and Python would print where each was, say in the import of torch.
_WORKER = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from laconic.cli import main
sys.exit(main())
"""


def launch(job: Job) -> int:
    """Run `laconic train ...` in job.workers processes and wait for them all; 0, or DIVERGED.

    Like torchrun, it is one node of several where PET_NNODES and the like say so.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    config = _config(job.workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.workers)))
    logging.disable(logging.ERROR)  # torchrun's warnings about workers that end; we say it in one line ourselves
    try:
        elastic_launch(config, sys.executable)("-c", _WORKER, "train", *job.arguments())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == DIVERGED:
            return DIVERGED
        raise LaunchError(f"worker {rank} of {job.workers} ended {_how(failure.exitcode)}; all were stopped") from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise LaunchError(f"stopped by {error.sigval.name}") from None
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _config(num_workers: int) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    try:
        num_nodes = int(os.environ.get("PET_NNODES", "1"))
        place = {"rank": int(os.environ["PET_NODE_RANK"])} if num_nodes > 1 else {}
        master = f"{os.environ['PET_MASTER_ADDR']}:{os.environ['PET_MASTER_PORT']}" if num_nodes > 1 else ""
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"PET_NNODES asks for several nodes, but {error}; set PET_NNODES=N, PET_NODE_RANK, PET_MASTER_ADDR and "
            "PET_MASTER_PORT, or start it with torchrun -m laconic train"
        ) from None
    if num_nodes == 1:
        # All workers are here, so their traffic need not find its way through the machine's outer interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend, endpoint = "c10d", "localhost:0"
    else:
        backend, endpoint = "static", master
    return LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_workers,
        run_id="laconic" if num_nodes > 1 else f"laconic-{os.getpid()}",
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=place,
        max_restarts=0,
        monitor_interval=0.1,
    )


def _how(exit_code: int) -> str:
    return f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
