"""plan() over real processes: it leaves a job as it was, all ranks agree, and DDP goes on as before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks as global_hooks

import laconic
from laconic.planning import Measured, Plan, auto, candidate
from laconic_lab.train import Job, worker
from tests.logs import logged
from tests.workers import WorkerPool

SCHEMES = ("bf16", "bf16 --accumulate 4", "topk:rho=0.05", "streaming:every=8", "gossip")


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


class _Job:
    def __init__(self, *, in_ddp: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.Linear(80, 10))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.net: nn.Module = DistributedDataParallel(self.model, bucket_cap_mb=0.001) if in_ddp else self.model

    @property
    def ddp(self) -> DistributedDataParallel:
        assert isinstance(self.net, DistributedDataParallel)
        return self.net

    def step(self) -> None:
        inputs = torch.randn(8, 40) + dist.get_rank()
        self.optimizer.zero_grad()
        self.net(inputs).logsumexp(1).mean().backward()
        self.optimizer.step()

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(*pair) for pair in zip(one, other, strict=True))
    return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)


def _planned(in_ddp: bool) -> tuple[dict[str, Any], bool]:
    job = _Job(in_ddp=in_ddp)
    job.optimizer = torch.optim.AdamW(job.model.parameters())
    job.step()
    before = job.state()
    with logged() as lines:
        found = laconic.plan(job.net, [job.optimizer], job.step, schemes=SCHEMES)
    assert not lines  # nobody has chosen what is only tried
    return found.as_dict(), _same(before, job.state())


@pytest.mark.parametrize("in_ddp", [True, False])
def test_a_plan_leaves_the_job_as_it_was_and_all_ranks_agree(two: WorkerPool, in_ddp: bool) -> None:
    (first, same_first), (second, same_second) = two.run(_planned, in_ddp)
    assert same_first and same_second
    assert first["pick"] == second["pick"]
    assert [row["scheme"] for row in first["rows"]] == [row["scheme"] for row in second["rows"]]
    assert {row["scheme"] for row in first["rows"]} == {str(candidate(text)) for text in SCHEMES}
    assert all(row["step_ms"] > 0 for row in first["rows"])
    assert any(row["tried"] for row in first["rows"]) is in_ddp
    assert (len(first["compute"]["arrivals_s"]) > 1) is in_ddp  # as many as DDP has buckets
    assert first["slowest_pair"] == second["slowest_pair"] is not None


def _after() -> tuple[list[float], list[float], int]:
    plain, planned, attached = (_Job(in_ddp=True) for _ in range(3))
    for job in (planned, attached):
        laconic.plan(job.net, job.optimizer, job.step, schemes=("bf16",))
    for job in (plain, planned):
        torch.manual_seed(1)
        job.step()
    session = laconic.attach(attached.ddp, "topk:rho=0.05")
    attached.step()
    steps = session.stats().steps
    session.close()
    sums = [[float(p.sum()) for p in job.model.parameters()] for job in (plain, planned)]
    return sums[0], sums[1], steps


def test_ddp_averages_as_before_after_a_plan_and_takes_a_session(two: WorkerPool) -> None:
    for plain, planned, steps in two.run(_after):
        assert plain == planned
        assert steps == 1


def _refused() -> str:
    job = _Job(in_ddp=True)
    session = laconic.attach(job.ddp, "bf16")
    try:
        laconic.plan(job.net, job.optimizer, job.step)
    except laconic.SchemeError as error:
        return str(error)
    finally:
        session.close()
    return ""


def test_plan_comes_before_attach(two: WorkerPool) -> None:
    assert all("hook already" in said for said in two.run(_refused))


def _auto(kind: str) -> tuple[str | None, list[int], bool, str]:
    job = _Job(in_ddp=kind == "gradients")
    job.optimizer = torch.optim.AdamW(job.model.parameters())
    if kind == "gradients":
        session: Any = laconic.attach(job.ddp, "auto")
    else:
        session = laconic.follow(job.model, job.optimizer, "auto")
    with logged() as said:
        for _ in range(60):
            job.step()
            if kind == "drift":
                session.step()
    assert not [line for line in said if "nothing was exchanged" in line]
    saved = session.state_dict()
    steps = session.stats().steps
    again = _Job(in_ddp=kind == "gradients")
    other: Any = laconic.attach(again.ddp, "auto") if kind == "gradients" else None
    if other is None:
        other = laconic.follow(again.model, again.optimizer, "auto")
    other.load_state_dict(saved)
    kept = other.stats().scheme == session.stats().scheme and other.state_dict()["auto"] == saved["auto"]
    told = [one for one in said if "auto continues" in one]
    session.close()
    other.close()
    assert not global_hooks and not job.optimizer._optimizer_step_post_hooks
    return saved["auto"], [steps, len(told)], kept, session.plan.measured.optimizer


@pytest.mark.parametrize("kind", ["gradients", "drift"])
def test_auto_chooses_once_says_so_and_a_resume_keeps_the_choice(two: WorkerPool, kind: str) -> None:
    first, second = two.run(_auto, kind)
    assert first[0] == second[0] and first[0] is not None
    assert candidate(first[0]).scheme.of_what in (("gradients",) if kind == "gradients" else ("drift", "models"))
    assert first[1][1] == 1 and second[1][1] == 0  # told by rank 0
    assert first[2] and second[2]
    assert first[3] == second[3] == "adamw"  # noticed, not told


def _resumed() -> list[tuple[str, str]]:
    """What states say that were saved after each step around the choice, and what a new session makes of them."""
    found = []
    job, again = _Job(in_ddp=True), _Job(in_ddp=True)
    session = laconic.attach(job.ddp, "auto")
    with logged():
        for _ in range(10):
            job.step()
            saved = session.state_dict()
            other = laconic.attach(again.ddp, "auto")
            other.load_state_dict(saved)
            found.append((saved["chosen"]["scheme"], str(other.stats().scheme)))
            other.close()
    session.close()
    return found


def _choosing(pick: str, function: Callable[[], Any]) -> Any:
    """What a function returns where plans pick this."""
    usual = auto.answer

    def picked(measured: Measured) -> Plan:
        return replace(usual(measured), pick=pick)

    auto.answer = picked  # type: ignore[assignment]
    try:
        return function()
    finally:
        auto.answer = usual


def test_a_state_of_any_step_around_the_choice_resumes(two: WorkerPool) -> None:
    for found in two.run(_choosing, "topk:rho=0.01", _resumed):
        assert all(saved == resumed for saved, resumed in found)
        assert {"bf16", "topk:rho=0.01"} <= {saved for saved, _ in found}


def _trained() -> tuple[str, bool, bool]:
    job = Job(scheme="auto", batch=4)
    usual = worker.AUTOMATIC
    worker.AUTOMATIC = ("bf16", "local:every=8")
    try:
        chosen = worker.settle_scheme(job, job.load_data(), torch.device("cpu"))
    finally:
        worker.AUTOMATIC = usual
    return chosen.scheme, chosen.auto, replace(chosen, scheme="bf16", auto=True) == job


def test_a_job_under_auto_becomes_one_of_what_is_picked(two: WorkerPool) -> None:
    first, second = two.run(_trained)
    assert first == second and first[0] in ("bf16", "local:every=8")
    assert not first[1] and first[2]
