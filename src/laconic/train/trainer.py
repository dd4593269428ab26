"""The training loop's state, and its three verbs: step, evaluate, save."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laconic.attach import attach
from laconic.attach.attach import DdpSession
from laconic.errors import LaconicError
from laconic.exchange import Served
from laconic.recipes import parse
from laconic.scheme import TorchHook
from laconic.session import PHASES, Session, Stats
from laconic.tasks import Data
from laconic.train.checkpoint import load_checkpoint, save_checkpoint
from laconic.train.council import Circle, Council, ServedCouncil
from laconic.train.course import Course, loss_of
from laconic.train.interface import interface_bytes
from laconic.train.job import Job
from laconic.train.resume import check_resume, remark, settings

_ONE_BUCKET_MB = 4096
_EVAL_BATCH = 100


class Trainer:
    """A model under DDP with a scheme attached, and this worker's share of the data."""

    def __init__(self, job: Job, data: Data, device: torch.device) -> None:
        self.job, self.device, self.data = job, device, data
        scheme = parse(job.scheme)
        self.rank, self.num_workers = dist.get_rank() - job.servers, dist.get_world_size() - job.servers
        self.course = Course(job, data, self.rank, self.num_workers)
        self.num_steps = self.course.num_steps
        one_bucket = isinstance(scheme, TorchHook) and scheme.hook == "powersgd"
        model = self.course.model(device)
        ranks = range(job.servers, dist.get_world_size())
        group = dist.new_group(list(ranks), use_local_synchronization=True) if job.servers else dist.group.WORLD
        self.ddp = DistributedDataParallel(
            model,
            process_group=group,
            bucket_cap_mb=_ONE_BUCKET_MB if one_bucket else None,
        )
        # Broadcasting them at every step would end with the first worker that dies.
        self.ddp.broadcast_buffers = not job.asks_servers
        self.optimizer = self.course.optimizer(self.ddp)
        servers = range(job.servers) if job.asks_servers else ()
        self.session = attach(self.ddp, scheme, servers=servers, timeout_s=job.server_timeout)
        self.council: Council = Circle(group, device)
        if isinstance(self.session, Session) and isinstance(self.session.medium, Served):
            self.council = ServedCouncil(self.session.medium)
        self.steps_done = 0
        self.seconds = 0.0  # of training; evaluation is not counted
        self.bytes_before = {"out": 0, "in": 0, "dense": 0}  # what the session counted before a resume
        self.facts: list[dict[str, Any]] = []
        self.last_evaluation: dict[str, Any] = {}
        self.diverged_at: int | None = None  # the step from which on the loss was no number
        self._not_finite_since: int | None = None

    def step(self, number: int) -> dict[str, Any]:
        """Train on one batch; returns what was measured."""
        before, seen_before = self.session.stats(), interface_bytes()
        start = time.perf_counter()
        self.course.set_rate_(self.optimizer, number)
        inputs, targets = (part.to(self.device) for part in self.course.examples(number))
        self.optimizer.zero_grad()
        loss = loss_of(self.ddp(inputs), targets)
        self._backward(-loss if self.rank >= self.num_workers - self.job.flipped else loss)
        self.optimizer.step()
        loss_value = float(loss.detach())  # on CUDA this waits for the step to end
        seconds = time.perf_counter() - start
        after, seen_after = self.session.stats(), interface_bytes()
        self.seconds += seconds
        self.steps_done = number + 1
        self._not_finite_since = None if math.isfinite(loss_value) else self._not_finite_since or self.steps_done
        fact: dict[str, Any] = {
            "step": self.steps_done,
            "loss": loss_value,
            "ms": 1e3 * seconds,
            **{f"{phase}_ms": 1e3 * (after.seconds[phase] - before.seconds[phase]) for phase in PHASES},
            "bytes_out": after.bytes_out - before.bytes_out,
            "bytes_in": after.bytes_in - before.bytes_in,
        }
        if seen_before is not None and seen_after is not None:
            fact["link_bytes_out"], fact["link_bytes_in"] = (
                a - b for a, b in zip(seen_after, seen_before, strict=True)
            )
        self.facts.append(fact)
        return fact

    def _backward(self, loss: Tensor) -> None:
        """The backward pass; what went wrong in the session's thread is raised as it was, not as DDP wraps it."""
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            cause = self.session.background.error if isinstance(self.session, DdpSession) else None
            if isinstance(cause, LaconicError):
                raise cause from None
            raise

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Accuracy and loss on the test data, which the workers share; every worker gets the same figures."""
        model = self.ddp.module.eval()
        self.council.share_(model.buffers())
        sums = torch.zeros(3, dtype=torch.float64)
        for inputs, targets in self._test_batches():
            logits = model(inputs)
            right = (logits.argmax(-1) == targets).sum()
            sums += torch.tensor([float(right), float(loss_of(logits, targets)) * targets.numel(), targets.numel()])
        model.train()
        right_total, loss_total, count = self.council.total(sums).tolist()
        if not math.isfinite(loss_total) and self.steps_done:  # the sum of all workers, who thus agree to stop
            self.diverged_at = self._not_finite_since or self.steps_done
        self.last_evaluation = {
            "step": self.steps_done,
            "seconds": self.seconds,
            "accuracy": right_total / count,
            "loss": loss_total / count,
            "bytes_out": self.bytes_so_far()["out"],
        }
        return self.last_evaluation

    def stats(self, *, ages: bool = False) -> Stats:
        """The session's, with the ages of what waits where they are asked for and known."""
        return self.session.stats(ages=ages) if isinstance(self.session, Session) else self.session.stats()

    def bytes_so_far(self) -> dict[str, int]:
        """What this worker sent and heard since the first step, and what dense would have sent."""
        stats, before = self.session.stats(), self.bytes_before
        return {
            "out": before["out"] + stats.bytes_out,
            "in": before["in"] + stats.bytes_in,
            "dense": before["dense"] + stats.dense_bytes_out,
        }

    def _test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        num_examples = len(self.data.test_targets)
        for start in range(self.council.place * _EVAL_BATCH, num_examples, self.council.num_living * _EVAL_BATCH):
            part = slice(start, start + _EVAL_BATCH)
            inputs = self.data.prepare(self.data.test_inputs[part])
            yield inputs.to(self.device), self.data.test_targets[part].to(self.device)

    def save(self) -> None:
        """Write a checkpoint to --out, if there is one; that of a run which then diverged is kept."""
        if self.job.out is not None and not self.job.no_checkpoint and self.steps_done and self.diverged_at is None:
            state: dict[str, Any] = {"session": self.session.state_dict(), "bytes": self.bytes_so_far()}
            if self.council.place == 0:
                state |= {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict()}
                state |= {"seconds": self.seconds, "settings": settings(self.job)}
            save_checkpoint(self.job.out, self.steps_done, self.rank, state, self.council)

    def resume(self) -> int:
        """Load the newest checkpoint in --out; returns the first step still to do."""
        assert self.job.out is not None
        step, states = load_checkpoint(self.job.out)
        check_resume(self.job, self.num_steps, step, states)
        if self.rank == 0 and (changed := remark(self.job, states)):
            print(f"laconic: {changed}", file=sys.stderr, flush=True)
        lead = next(state for state in states if "model" in state)
        self.ddp.module.load_state_dict(lead["model"])
        self.optimizer.load_state_dict(lead["optimizer"])
        self.session.load_state_dict([state["session"] for state in states])
        self.seconds, self.steps_done = lead["seconds"], step
        for way in self.bytes_before:  # the number of workers may have changed, so each takes the mean
            self.bytes_before[way] = round(sum(state["bytes"][way] for state in states) / len(states))
        return step
