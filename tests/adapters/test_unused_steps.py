"""Backward passes whose gradients are thrown away, as GANs, probes and a user's own rules have them."""

from __future__ import annotations

import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.ddp_training import batch
from tests.logs import logged
from tests.workers import WorkerPool, flat_parameters

TOPK = "topk:rho=0.05"
GAN = Path(__file__).parents[2] / "examples" / "gan.py"
KEEPING = [TOPK, "overlap:rho=0.05", "lowrank:rank=1", "dgc:rho=0.05"]


def _regression(scheme: str, passes: str, **options: Any) -> tuple[Tensor, list[str]]:
    """Train on other passes beside those that are stepped; returns the parameters, and what was logged of them."""
    with logged() as lines:
        parameters = _trained(scheme, passes, **options)
    return parameters, [line for line in lines if "no optimizer had used" in line]


def _trained(scheme: str, passes: str, **options: Any) -> Tensor:
    torch.manual_seed(3)
    parts = torch.nn.PixelUnshuffle(2), torch.nn.Conv2d(4, 8, 3), torch.nn.Flatten(), torch.nn.Linear(32, 40)
    ddp = DistributedDataParallel(torch.nn.Sequential(*parts).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    session: Any = laconic.attach(ddp, scheme, **options)

    def backward(number: int, scale: float = 1.0) -> None:
        x, y = batch(number)
        (scale * torch.nn.functional.cross_entropy(ddp(x), y)).backward()  # type: ignore[no-untyped-call]

    for number in range(12):
        if passes == "unused" and number:  # DDP cuts its buckets anew after the first of all
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            backward(1000 + number, 30.0)
        elif passes == "discarded" and number:
            optimizer.zero_grad()
            backward(1000 + number, 30.0)
            session.discard_()
        elif passes == "no_sync":
            optimizer.zero_grad()
            with ddp.no_sync():
                backward(1000 + number, 30.0)
        if passes != "accumulated" or number % 3 == 0:
            optimizer.zero_grad(set_to_none=passes != "zeros")
        backward(number)
        if passes == "accumulated" and number % 3 != 2:
            continue
        if passes == "clipped":
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        if passes == "by hand":
            with torch.no_grad():
                for parameter in ddp.parameters():
                    assert parameter.grad is not None
                    parameter.data.add_(parameter.grad, alpha=-0.05)
        else:
            optimizer.step()
    session.close()
    return flat_parameters(ddp)


@cache
def _undisturbed(pool: WorkerPool, text: str) -> list[tuple[Tensor, list[str]]]:
    return pool.run(_regression, text, "none")


@pytest.mark.parametrize("text", KEEPING)
@pytest.mark.parametrize("passes", ["unused", "discarded"])
def test_a_discarded_pass_has_no_effect(four_workers: WorkerPool, text: str, passes: str) -> None:
    plain = _undisturbed(four_workers, text)
    with_passes = four_workers.run(_discarding, text, passes)
    for (want, _), (got, lines) in zip(plain, with_passes, strict=True):
        assert torch.equal(want, got) and not lines


def _discarding(text: str, passes: str) -> tuple[Tensor, list[str]]:
    return _regression(text, passes, unused_steps="discard")


def test_an_unused_pass_is_told_once_with_the_cure(four_workers: WorkerPool) -> None:
    lines = [lines for _, lines in four_workers.run(_regression, TOPK, "unused")]
    assert [len(each) for each in lines] == [1, 0, 0, 0]
    assert "no_sync()" in lines[0][0] and "unused_steps='discard'" in lines[0][0]


@pytest.mark.parametrize("passes", ["none", "zeros", "accumulated", "clipped", "by hand", "no_sync"])
def test_there_is_no_false_alarm(four_workers: WorkerPool, passes: str) -> None:
    assert all(not lines for _, lines in four_workers.run(_regression, TOPK, passes))


def _refused() -> list[str]:
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    refusals = []
    forget: Any = "forget"
    for call in (partial(laconic.attach, ddp), laconic.hook):
        with pytest.raises(laconic.SchemeError) as error:
            call(TOPK, unused_steps=forget)
        refusals.append(str(error.value))
    session: Any = laconic.attach(ddp, TOPK)
    with pytest.raises(laconic.StateError) as state_error:
        session.discard_()
    session.close()
    return [*refusals, str(state_error.value)]


def test_wrong_use_says_what_to_give(four_workers: WorkerPool) -> None:
    for *options, method in four_workers.run(_refused):
        assert all("give 'warn', 'discard' or 'ignore'" in option for option in options) and len(options) == 2
        assert "unused_steps='discard'; give it there" in method


def _loss_of_gan(*variant: str) -> tuple[float, str]:
    """The discriminator's loss at the end of the example, and what it said."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run([*launch, str(GAN), *variant], capture_output=True, text=True, check=True)
    return float(ran.stdout.split("loss: ")[1].split(";")[0]), ran.stderr


@pytest.mark.slow  # three trainings
def test_a_gan_learns_where_its_unwanted_passes_are_not_exchanged() -> None:
    plain, _ = _loss_of_gan("--plain")
    careful, told = _loss_of_gan()
    careless, warned = _loss_of_gan("--careless")
    assert plain < careful < careless and careful - plain < careless - careful  # 0.54, 0.60 and 0.68 when written
    assert "no optimizer had used" in warned and "no optimizer had used" not in told
