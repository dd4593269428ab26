"""Start the workers of a job through torchrun's own machinery."""

from __future__ import annotations

import logging
import os
import signal
import sys

from laconic.errors import LaunchError
from laconic.train.job import Job

_LOOPBACK = "lo"


def launch(job: Job) -> None:
    """Run `python -m laconic train ...` in job.workers processes and wait for them all."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.workers,
        run_id=f"laconic-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    # All workers are here, so their traffic need not find its way through the machine's outer interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.workers)))
    logging.disable(logging.ERROR)  # torchrun's warnings about workers that end; we say it in one line ourselves
    try:
        elastic_launch(config, sys.executable)("-m", "laconic", "train", *job.arguments())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise LaunchError(f"worker {rank} of {job.workers} ended {_how(failure.exitcode)}; all were stopped") from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise LaunchError(f"stopped by {error.sigval.name}") from None
    finally:
        logging.disable(logging.NOTSET)


def _how(exit_code: int) -> str:
    return f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
