"""Workers whose model is one under DDP: its gradients are exchanged during the backward pass."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic import Attached, attach
from laconic.errors import LaconicError
from laconic.recipes import parse
from laconic.scheme import TorchHook
from laconic.transport import naming_lost_peers, values_differ, world
from laconic_lab.train.course import Course
from laconic_lab.train.job import Job
from laconic_lab.train.loop import Learner
from laconic_lab.train.worker_group import ProcessWorkers, ServedWorkers

_ONE_BUCKET_MB = 4096
_WORTH_A_PIPELINE = 1 << 24  # entries: three of DDP's default buckets
_HAS_INIT_SYNC = "init_sync" in signature(DistributedDataParallel.__init__).parameters  # or DDP always sends


def in_ddp(
    model: nn.Module, group: dist.ProcessGroup | None, bucket_cap_mb: float | None = None
) -> DistributedDataParallel:
    """The model as every job trains it under DDP; a call that all ranks of the group make.

    DDP would send rank 0's model to all. Ranks of one seed have it already; where one differs, it is sent.
    """
    group = group or world()
    differ = values_differ(group, next(model.parameters()).device, [*model.parameters(), *model.buffers()])
    only_where_they_differ: dict[str, Any] = {"init_sync": differ} if _HAS_INIT_SYNC else {}
    return DistributedDataParallel(
        model,
        process_group=group,
        **only_where_they_differ,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,  # no copy of what a bucket has become
    )


class DdpLearner(Learner):
    """A model under DDP with a scheme attached; made by a call that all workers make."""

    session: Attached

    def __init__(self, job: Job, course: Course, device: torch.device, group: dist.ProcessGroup | None) -> None:
        scheme = parse(job.scheme)
        self.course = course
        self._device = device
        self.model = course.model(device)
        self.updater = course.updater(self.model)
        # An owner's answer to a bucket waits for the last worker, so a step of several buckets waits as often; in a
        # large model those waits overlap with other buckets' work.
        is_small = sum(p.numel() for p in self.model.parameters()) < _WORTH_A_PIPELINE
        one_bucket = (scheme.has_owners and is_small) or (isinstance(scheme, TorchHook) and scheme.hook == "powersgd")
        self._ddp = in_ddp(self.model, group, bucket_cap_mb=_ONE_BUCKET_MB if one_bucket else None)
        # Broadcasting them at every step would end with the first worker that dies, and would not be silent.
        self._ddp.broadcast_buffers = scheme.talks and not job.asks_servers
        servers = range(job.servers) if job.asks_servers else ()
        self.session = attach(
            self._ddp,
            scheme,
            grad_scaler=self.updater.grad_scaler,
            servers=servers,
            timeout_s=job.server_timeout,
            pipeline=False if job.no_pipeline else None,
        )
        self.group = ProcessWorkers(group, device)
        transport = self.session.transport
        if transport is not None and transport.has_servers:
            self.group = ServedWorkers(transport)

    def learn_(self, step: int) -> float:
        """One step; what went wrong in the session's thread is raised as it was, not as DDP wraps it."""
        self.updater.optimizer.zero_grad()
        try:
            loss = self.course.backward_(self._ddp, self.updater, step, self._device, self._ddp.no_sync)
        except RuntimeError as error:
            if isinstance(self.session.error, LaconicError):
                raise self.session.error from None
            if "gloo" in str(error):  # DDP's own broadcasts of a model's buffers
                with naming_lost_peers(self.course.rank):
                    raise
            raise
        if self.updater.grad_scaler is not None or self.session.last_step_finite:
            self.updater.apply_()
        return float(loss)  # on CUDA this waits for the step to end

    @torch.no_grad()
    def score(self, *, is_last: bool) -> tuple[list[float], dict[str, Any]]:
        """Each worker scores a part of the test data."""
        self.group.share_(self.model.buffers())
        sums = [0.0, 0.0, 0.0]
        while not sums[2]:  # again where whoever had all of a small test has died meanwhile, as all see alike
            part = self.course.score(self.model, self._device, self.group.place, self.group.num_living)
            sums = self.group.total(torch.tensor(part, dtype=torch.float64)).tolist()
        return sums, {}
