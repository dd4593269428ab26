"""Train one task under one scheme, with every step measured."""

from laconic.train.job import Job
from laconic.train.launch import launch, verdict, worker_command
from laconic.train.result import DIVERGED
from laconic.train.virtual import work_in_process
from laconic.train.worker import is_worker, work

__all__ = ["DIVERGED", "Job", "is_worker", "launch", "verdict", "work", "work_in_process", "worker_command"]
