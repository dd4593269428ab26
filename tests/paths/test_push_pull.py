"""Where workers own shares: two ways to the owners that give the same, and what is said where one of them fails."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic import FrameError, PeerError, Scheme, Session, parse
from laconic.layout import Layout
from laconic.server import Owner
from laconic.transport import (
    Count,
    Fault,
    Faults,
    FaultyCollectives,
    Group,
    InProcess,
    Push,
    in_process,
    own_group,
    world,
)
from tests.virtual import gradients, one_step
from tests.workers import WorkerPool


def made(text: str) -> Scheme:
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    return scheme


class _ByRounds(Group):
    """A group over Gloo whose workers cannot call each other."""

    _mesh = None


def _sharded(text: str, kind: type[Group]) -> tuple[list[dict[str, Tensor]], dict[str, Count]]:
    """Four steps over Gloo; what one worker applied and counted."""
    cpu = torch.device("cpu")
    transport = kind(own_group(world(), cpu), cpu)
    session = Session(made(text), transport)
    return [one_step(session, gradients(dist.get_rank(), step)) for step in range(4)], transport.traffic.copy()


@pytest.mark.parametrize("text", ["overlap:rho=0.05", "sparse-sign", "topk:rho=0.9,quantize=none,exchange=server"])
def test_mesh_and_rounds_give_the_same_and_count_the_same(four_workers: WorkerPool, text: str) -> None:
    def work(transport: InProcess) -> tuple[list[dict[str, Tensor]], dict[str, Count]]:
        session = Session(made(text), transport)
        return [one_step(session, gradients(transport.rank, step)) for step in range(4)], transport.traffic.copy()

    ways = [four_workers.run(_sharded, text, Group), four_workers.run(_sharded, text, _ByRounds), in_process(4, work)]
    for rank in range(4):
        (mesh, counted), *others = (way[rank] for way in ways)
        for applied, count in others:
            assert count == counted
            for mine, theirs in zip(mesh, applied, strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def _faulty(fault: Fault) -> str:
    """What a worker says when the second message of rank 2 goes wrong."""
    cpu = torch.device("cpu")
    faults = Faults({1: fault} if dist.get_rank() == 2 else {})
    transport = FaultyCollectives(Group(own_group(world(), cpu), cpu), faults)
    session = Session(made("topk:rho=0.05,exchange=server"), transport)
    with pytest.raises((FrameError, PeerError)) as error:
        one_step(session, gradients(dist.get_rank(), 0))
    return str(error.value)


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.TRUNCATE, Fault.DUPLICATE])
def test_who_hears_a_damaged_message_names_its_sender(four_workers: WorkerPool, fault: Fault) -> None:
    for said in four_workers.run(_faulty, fault):
        assert "from rank 2" in said and "\n" not in said


def _one_gives_up() -> str:
    """What a worker says when one of them fails before it answers."""
    cpu = torch.device("cpu")

    group = Group(own_group(world(), cpu), cpu)
    session = Session(made("topk:rho=0.05,exchange=server"), group)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(Owner, "answer_to", _fail)
        with pytest.raises((FrameError, PeerError)) as error:
            one_step(session, gradients(dist.get_rank(), 0))
    return str(error.value)


def _fail(*_: object, **__: object) -> None:
    raise FrameError("rank 2 fails")


def _says_too_much() -> list[str]:
    """What is said of rank 2, which tells all 101 bytes, and pushes 9, where 100 and 8 may be."""
    cpu = torch.device("cpu")
    group = _ByRounds(own_group(world(), cpu), cpu)
    speaks = dist.get_rank() == 2
    parts = [torch.zeros(9 if speaks else 4, dtype=torch.uint8)] * 4
    said = []
    with pytest.raises(FrameError) as error:
        group.broadcast(torch.zeros(101, dtype=torch.uint8) if speaks else None, 2, 100)
    said.append(str(error.value))
    with pytest.raises(FrameError) as error:
        group.push(Push(Layout.of(["w"], [4]), 0, 0, parts, [8] * 4))
    return [*said, str(error.value)]


def test_no_more_is_heard_than_may_be_said(four_workers: WorkerPool) -> None:
    for said in four_workers.run(_says_too_much, timeout_s=60):
        assert said == [
            f"rank 2 is to send {what}; nothing is applied" for what in ("101 bytes of 100", "9 bytes of 8")
        ]


def test_who_fails_says_so_to_those_who_wait_for_it(four_workers: WorkerPool) -> None:
    said = four_workers.run(_one_gives_up, timeout_s=60)
    assert said.pop(2) == "rank 2 fails"
    assert all("gave up" in other for other in said)
