"""Train one task under one scheme, with every step measured."""

from laconic.measure.train.job import Job
from laconic.measure.train.launch import launch, verdict, worker_command
from laconic.measure.train.result import DIVERGED
from laconic.measure.train.virtual import work_in_process
from laconic.measure.train.worker import is_worker, work

__all__ = ["DIVERGED", "Job", "is_worker", "launch", "verdict", "work", "work_in_process", "worker_command"]
