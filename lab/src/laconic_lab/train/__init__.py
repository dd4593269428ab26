"""Train one task under one scheme, with every step measured."""

from laconic_lab.train.job import Job
from laconic_lab.train.launch import launch, verdict, worker_command
from laconic_lab.train.result import DIVERGED
from laconic_lab.train.virtual import work_in_process
from laconic_lab.train.worker import work

__all__ = ["DIVERGED", "Job", "launch", "verdict", "work", "work_in_process", "worker_command"]
