"""Networks that fail on purpose do so at the message they were told, and otherwise change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic import FrameError, PeerError, Session, parse
from laconic.layout import Layout
from laconic.transport import (
    Fault,
    Faults,
    FaultyCollectives,
    FaultyMailbox,
    InProcess,
    Push,
    WorkerDiedError,
    in_process,
)
from tests.local_mailbox import local_mailboxes
from tests.virtual import gradients, one_step

SAID = torch.arange(1, 9).to(torch.uint8)


def _heard(fault: Fault, what: str) -> list[list[int]]:
    """What rank 0 hears of three messages of rank 1, of which the second goes wrong."""

    def work(transport: InProcess) -> list[list[int]]:
        end = FaultyCollectives(transport, Faults({1: fault} if transport.rank == 1 else {}, 2.5, slept.append))
        heard: list[list[int]] = []
        for number in range(3):
            mine = SAID + 10 * number if end.rank else torch.zeros_like(SAID)
            if what == "all_reduce_":
                end.all_reduce_(mine, "kind")
                heard.append(mine.tolist())
            elif what == "all_gather":
                heard.append(end.all_gather(mine, "kind")[1].tolist())
            elif what == "all_to_all":
                heard.append(end.all_to_all(mine.expand(2, -1).contiguous(), "kind")[1].tolist())
            elif what == "swap":
                heard.append(end.sendrecv(mine, 1 - end.rank, "kind", mine.numel()).tolist())
            else:
                heard.append(end.broadcast(mine if end.rank else None, 1, 100).tolist())
        return heard

    slept: list[float] = []
    told = in_process(2, work)[0]
    assert slept == [2.5] * (fault == Fault.DELAY)
    return told


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault != Fault.DIE])
@pytest.mark.parametrize("what", ["all_reduce_", "all_gather", "all_to_all", "swap", "broadcast"])
def test_the_message_goes_wrong_as_told_and_no_other(what: str, fault: Fault) -> None:
    first, second, third = ((SAID + 10 * number).tolist() for number in range(3))
    zeros = [0] * (0 if what == "broadcast" else 8)
    half = second if what == "all_to_all" else second[:4] + zeros[:4]  # there, it befalls the second of two rows
    damaged = [byte ^ (number == 4 and what != "all_to_all") for number, byte in enumerate(second)]
    arrives = {
        Fault.DROP: zeros,
        Fault.TRUNCATE: half,
        Fault.DELAY: second,
        Fault.DUPLICATE: second,
        Fault.DAMAGE: damaged,
    }
    assert _heard(fault, what) == [first, arrives[fault], second if fault == Fault.DUPLICATE else third]


def test_a_worker_dies_at_the_message_it_was_told_and_stays_dead() -> None:
    def work(transport: InProcess) -> None:
        end = FaultyCollectives(transport, Faults({1: Fault.DIE}))
        end.all_gather(SAID, "kind")
        for _ in range(2):
            with pytest.raises(WorkerDiedError):
                end.all_gather(SAID, "kind")

    in_process(2, work)


@pytest.mark.parametrize(("fault", "length"), [(Fault.DROP, 0), (Fault.TRUNCATE, 4), (Fault.DELAY, 8)])
def test_parts_go_wrong_all_at_once(fault: Fault, length: int) -> None:
    def work(transport: InProcess) -> dict[int, int]:
        end = FaultyCollectives(transport, Faults({0: fault} if transport.rank == 1 else {}))
        push = Push(Layout.of(["w"], [16]), 0, 0, [SAID, SAID], [8, 8])
        return {rank: told.numel() for rank, told in end.push(push).items()}

    assert in_process(2, work) == [{0: 8, 1: length}] * 2


@pytest.mark.parametrize("text", ["dense", "topk:rho=0.05", "topk:rho=0.05,exchange=server", "maxnorm", "overlap"])
def test_without_faults_nothing_changes(text: str) -> None:
    def work(transport: InProcess) -> None:
        plain = Session(parse(text), transport)  # type: ignore[arg-type]
        faulty = Session(parse(text), FaultyCollectives(transport, Faults({})))  # type: ignore[arg-type]
        for step in range(3):
            given = gradients(transport.rank, step)
            want = one_step(plain, given)
            got = one_step(faulty, given)
            assert all(torch.equal(want[name], got[name]) for name in want)

    in_process(3, work)


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.TRUNCATE, Fault.DUPLICATE, Fault.DAMAGE])
def test_a_session_refuses_what_went_wrong(fault: Fault) -> None:
    def work(transport: InProcess) -> None:
        end = FaultyCollectives(transport, Faults({1: fault} if transport.rank == 1 else {}))
        session = Session(parse("topk:rho=0.05,exchange=server"), end)  # type: ignore[arg-type]
        one_step(session, gradients(transport.rank, 0))

    with pytest.raises(FrameError, match="rank 1"):
        in_process(3, work)


def _boxes(questions: dict[int, Fault], replies: dict[int, Fault]) -> tuple[FaultyMailbox, list[list[int]]]:
    """Rank 0's mailbox, and what rank 1 hears; rank 1 tells back what it was told."""
    first, second = local_mailboxes(2)
    heard: list[list[int]] = []

    def echo(peer: int, turn: int, said: Tensor, num_bytes: int) -> Tensor:
        heard.append(said.tolist())
        return said

    FaultyMailbox(second, Faults({}), Faults(replies)).listen(echo)
    return FaultyMailbox(first, Faults(questions, 0.5, lambda s: heard.append([s == 0.5])), Faults({})), heard


def test_questions_go_wrong_as_told() -> None:
    said = SAID.tolist()
    box, heard = _boxes({0: Fault.TRUNCATE, 1: Fault.DUPLICATE, 2: Fault.DELAY, 3: Fault.DROP, 5: Fault.DIE}, {})
    assert box.ask(1, 0, SAID, 4).tolist() == said[:4]
    assert box.ask(1, 1, SAID, 8).tolist() == box.ask(1, 2, SAID, 8).tolist() == said
    assert heard == [said[:4], said, said, [True], said]
    with pytest.raises(PeerError, match="rank 1 is gone"):
        box.ask(1, 3, SAID, 8)
    assert box.ask(1, 4, SAID, 8).tolist() == said
    for _ in range(2):
        with pytest.raises(WorkerDiedError):
            box.ask(1, 5, SAID, 8)
    assert len(heard) == 6


def test_replies_go_wrong_as_told() -> None:
    said = SAID.tolist()
    box, heard = _boxes({}, {0: Fault.TRUNCATE, 1: Fault.DROP, 2: Fault.DUPLICATE})
    told = [box.ask(1, turn, SAID + turn, 8).tolist() for turn in range(5)]
    assert told == [said[:4] + [0] * 4, [0] * 8, heard[2], heard[2], heard[4]]
