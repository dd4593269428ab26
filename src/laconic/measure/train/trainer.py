"""The training loop's state, and its three verbs: step, evaluate, save."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.attach import Attached, attach
from laconic.errors import LaconicError
from laconic.exchange import Server, Silent
from laconic.measure.tasks import Data
from laconic.measure.train.checkpoint import load_checkpoint, save_checkpoint
from laconic.measure.train.council import Circle, Council, ServedCouncil
from laconic.measure.train.course import Course, loss_of, score
from laconic.measure.train.facts import step_fact
from laconic.measure.train.interface import interface_bytes
from laconic.measure.train.job import Job
from laconic.measure.train.resume import check_resume, remark, settings
from laconic.recipes import parse
from laconic.scheme import AnyScheme, Scheme, TorchHook
from laconic.server.client import ServerClient
from laconic.session import Stats

_ONE_BUCKET_MB = 4096


class Trainer:
    """A model under DDP with a scheme attached, and this worker's share of the data."""

    is_alone: ClassVar[bool] = False  # whether each worker's model and optimizer are its own

    def __init__(self, job: Job, data: Data, device: torch.device) -> None:
        self.job, self.device, self.data = job, device, data
        scheme = parse(job.scheme)
        self.rank, self.num_workers = dist.get_rank() - job.servers, dist.get_world_size() - job.servers
        self.course = Course(job, data, self.rank, self.num_workers)
        self.num_steps = self.course.num_steps
        self.model = self.course.model(device)
        self.optimizer = self.course.optimizer(self.model)
        self.net, self.session, self.council = self._join(scheme)
        self.steps_done = 0
        self.seconds = 0.0  # of training; evaluation is not counted
        self.bytes_before = {"out": 0, "in": 0, "dense": 0}  # what the session counted before a resume
        self.facts: list[dict[str, Any]] = []
        self.last_evaluation: dict[str, Any] = {}
        self.diverged_at: int | None = None  # the step from which on the loss was no number
        self._not_finite_since: int | None = None

    def _join(self, scheme: AnyScheme) -> tuple[nn.Module, Attached, Council]:
        """(what a step calls, what it talks through, what the workers meet in); a call that all workers make."""
        job, group = self.job, self._workers()
        exchange = scheme.exchange if isinstance(scheme, Scheme) else None
        # An owner's answer to a bucket waits for the last worker, so a step of several buckets waits as often.
        one_bucket = isinstance(exchange, Server) or (isinstance(scheme, TorchHook) and scheme.hook == "powersgd")
        ddp = DistributedDataParallel(
            self.model,
            process_group=group,
            bucket_cap_mb=_ONE_BUCKET_MB if one_bucket else None,
            gradient_as_bucket_view=True,  # no copy of what a bucket has become
        )
        # Broadcasting them at every step would end with the first worker that dies, and would not be silent.
        ddp.broadcast_buffers = not (job.asks_servers or isinstance(exchange, Silent))
        servers = range(job.servers) if job.asks_servers else ()
        session = attach(ddp, scheme, servers=servers, timeout_s=job.server_timeout)
        transport = getattr(session, "transport", None)
        if isinstance(transport, ServerClient):
            return ddp, session, ServedCouncil(transport)
        return ddp, session, Circle(group, self.device)

    def _workers(self) -> dist.ProcessGroup | None:
        """The group of all ranks that do not serve."""
        if not self.job.servers:
            return dist.group.WORLD
        ranks = list(range(self.job.servers, dist.get_world_size()))
        workers: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
        return workers

    def _stepped(self) -> None:
        """What comes after the optimizer's step: here nothing, since DDP has talked before it."""

    def finish(self) -> None:
        """What comes after the last step, on the clock."""

    def step(self, number: int) -> dict[str, Any]:
        """Train on one batch; returns what was measured."""
        before, seen_before = self.session.stats(), interface_bytes()
        start = time.perf_counter()
        self.course.set_rate_(self.optimizer, number)
        inputs, targets = self.course.examples(number, self.device)
        self.optimizer.zero_grad()
        loss = loss_of(self.net(inputs), targets)
        self._backward(-loss if self.rank >= self.num_workers - self.job.flipped else loss)
        self.optimizer.step()
        self._stepped()
        loss_value = float(loss.detach())  # on CUDA this waits for the step to end
        seconds = time.perf_counter() - start
        after, seen_after = self.session.stats(), interface_bytes()
        self.seconds += seconds
        self.steps_done = number + 1
        self._not_finite_since = None if math.isfinite(loss_value) else self._not_finite_since or self.steps_done
        fact = step_fact(self.steps_done, loss_value, seconds, before, after)
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
            cause = self.session.error
            if isinstance(cause, LaconicError):
                raise cause from None
            raise

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Accuracy and loss on the test data, which the workers share; every worker gets the same figures."""
        self.council.share_(self.model.buffers())
        sums = torch.tensor(self.score(self.council.place, self.council.num_living), dtype=torch.float64)
        return self._evaluated(*self.council.total(sums).tolist())

    def score(self, place: int, num_places: int) -> list[float]:
        """[right answers, summed loss, answers] on the test data, or on one of several equal parts of it."""
        return score(self.model, self.data, self.device, place, num_places)

    def _evaluated(self, right_total: float, loss_total: float, count: float, **more: Any) -> dict[str, Any]:
        if not math.isfinite(loss_total) and self.steps_done:  # the sum of all workers, who thus agree to stop
            self.diverged_at = self._not_finite_since or self.steps_done
        self.last_evaluation = {
            "step": self.steps_done,
            "seconds": self.seconds,
            "accuracy": right_total / count,
            "loss": loss_total / count,
            "bytes_out": self.bytes_so_far()["out"],
            **more,
        }
        return self.last_evaluation

    def stats(self, *, ages: bool = False) -> Stats:
        """The session's, with the ages of what waits where they are asked for and known."""
        return self.session.stats(ages=ages)

    def bytes_so_far(self) -> dict[str, int]:
        """What this worker sent and heard since the first step, and what dense would have sent."""
        stats, before = self.session.stats(), self.bytes_before
        return {
            "out": before["out"] + stats.bytes_out,
            "in": before["in"] + stats.bytes_in,
            "dense": before["dense"] + stats.dense_bytes_out,
        }

    def save(self) -> None:
        """Write a checkpoint to --out, if there is one; that of a run which then diverged is kept."""
        if self.job.out is not None and not self.job.no_checkpoint and self.steps_done and self.diverged_at is None:
            state: dict[str, Any] = {"session": self.session.state_dict(), "bytes": self.bytes_so_far()}
            if self.council.place == 0 or self.is_alone:
                state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
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
        if self.is_alone:
            lead = next((state for state in states if state["session"].get("rank") == self.rank), lead)
        self.model.load_state_dict(lead["model"])
        self.optimizer.load_state_dict(lead["optimizer"])
        self.session.load_state_dict([state["session"] for state in states])
        self.seconds, self.steps_done = lead["seconds"], step
        for way in self.bytes_before:  # the number of workers may have changed, so each takes the mean
            self.bytes_before[way] = round(sum(state["bytes"][way] for state in states) / len(states))
        return step
