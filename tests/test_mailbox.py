"""The mailbox between processes: questions, meetings, and what happens when a peer is slow, gone or a stranger."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from laconic.errors import LaunchError, PeerError
from laconic.transport import QUESTION_HEAD_BYTES, InProcess, TcpMailbox, in_process, open_mailbox, tcp_mailbox


@contextmanager
def _mailboxes(num_workers: int, patience_s: float = 1.0) -> Iterator[list[TcpMailbox]]:
    boxes = in_process(num_workers, lambda transport: open_mailbox(transport, patience_s))
    try:
        yield boxes
    finally:
        for box in boxes:
            box.close()


def _letter(count: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + count).to(torch.uint8)


def _echo(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
    return (message[:num_bytes] + peer).contiguous()


@pytest.mark.parametrize("count", [0, 1, 24, 1_000_003])
def test_a_question_is_answered_and_both_ends_count_the_same_bytes(count: int) -> None:
    with _mailboxes(3) as boxes:
        for box in boxes:
            box.serve(_echo)
        assert torch.equal(boxes[2].ask(0, 7, _letter(count), count), _letter(count, 2))
        assert torch.equal(boxes[0].ask(2, 7, _letter(count), count // 2), _letter(count // 2))
        head = QUESTION_HEAD_BYTES
        out, back = 2 * (head + count), count + count // 2
        counted = []
        for _ in range(1000):  # who answers counts a moment after it was heard
            counted = [sum(box.traffic.bytes_out for box in boxes), sum(box.traffic.bytes_in for box in boxes)]
            if counted == [out + back] * 2:
                break
            time.sleep(0.01)
        assert counted == [out + back] * 2
        assert boxes[1].traffic.bytes_out == 0


def test_a_peer_that_takes_its_time_holds_up_nobody_else() -> None:
    goes_on = threading.Event()

    def answer(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        if peer == 1:
            goes_on.wait()
        return message

    with _mailboxes(3) as boxes:
        for box in boxes:
            box.serve(answer)
        slow = threading.Thread(target=boxes[1].ask, args=(0, 7, _letter(5), 5))
        slow.start()
        assert torch.equal(boxes[2].ask(0, 7, _letter(9), 9), _letter(9))
        assert slow.is_alive()
        goes_on.set()
        slow.join()


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).mean(0)


def test_all_who_meet_get_the_same_and_go_on_without_those_who_are_gone() -> None:
    with _mailboxes(4) as boxes:
        for box in boxes:
            box.serve(_echo)
        mine = [torch.full((2, 3), float(rank)) for rank in range(4)]

        def meet(*ranks: int) -> list[list[float]]:
            """What each of these is told, all at once."""
            with ThreadPoolExecutor(len(ranks)) as pool:
                meeting = [pool.submit(boxes[rank].meet, mine[rank], _mean, "average") for rank in ranks]
            return [done.result().tolist() for done in meeting]

        assert meet(0, 1, 2, 3) == [[1.5] * 6] * 4
        boxes[2].close()
        assert meet(0, 1, 3) == [[torch.tensor(4 / 3).item()] * 6] * 3
        boxes[0].close()  # who has combined for the others
        assert meet(1, 3) == [[2.0] * 6] * 2
        assert meet(1, 3) == [[2.0] * 6] * 2
        with pytest.raises(PeerError, match=r"rank 0 was lost before"):
            boxes[3].ask(0, 7, _letter(1), 1)
        with pytest.raises(PeerError, match=r"rank 2 is gone \(.+\)"):
            boxes[3].ask(2, 7, _letter(1), 1)


def test_who_missed_the_end_of_a_meeting_is_told_by_the_next_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    with _mailboxes(3) as boxes:
        for box in boxes:
            box.serve(_echo)

        def meet(rank: int, value: float) -> list[float]:
            found: list[float] = boxes[rank].meet(torch.full((2,), value), _mean, None).tolist()
            return found

        told = []

        def dies_before_the_last(peer: int, found: Tensor) -> None:
            told.append(peer)
            if peer == 1:
                TcpMailbox._tell(boxes[0], peer, found)

        monkeypatch.setattr(boxes[0], "_tell", dies_before_the_last)
        with ThreadPoolExecutor(3) as pool:
            last = pool.submit(meet, 2, 6.0)
            assert [done.result() for done in [pool.submit(meet, 0, 0.0), pool.submit(meet, 1, 3.0)]] == [[3.0] * 2] * 2
            assert told == [1, 2]
            boxes[0].close()
            second = pool.submit(meet, 1, 4.0)
            assert last.result() == [3.0] * 2
            assert meet(2, 6.0) == second.result() == [5.0] * 2


def test_a_worker_without_a_way_to_the_first_does_not_wait_for_ever() -> None:
    with _mailboxes(3, patience_s=0.001) as boxes:
        for box in boxes:
            box.serve(_echo)
        boxes[2]._to[0].shutdown(socket.SHUT_RDWR)  # while rank 1 waits for rank 0
        with pytest.raises(LaunchError, match="waited 0 s to meet rank 1 and has lost rank 0; mend its links"):
            boxes[2].meet(torch.zeros(1), _mean, None)


def test_an_answer_that_fails_is_said_and_leaves_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        raise ZeroDivisionError

    with _mailboxes(2) as boxes:
        boxes[1].serve(fails)
        for _ in range(2):
            assert boxes[0].ask(1, 7, _letter(4), 8).tolist() == [0] * 8
    assert capsys.readouterr().err.count("Traceback") == 2


def test_who_does_not_speak_as_a_mailbox_does_is_hung_up_on() -> None:
    with _mailboxes(2) as boxes:
        boxes[1].serve(_echo)
        boxes[0]._to[1].sendall(b"x" * 100)
        with pytest.raises(PeerError, match="rank 1 is gone"):
            boxes[0].ask(1, 7, _letter(4), 4)


def test_a_stranger_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tcp_mailbox._all_cards

    def told(transport: InProcess, mine: list[str | int]) -> list[list[str | int]]:
        if transport.rank == 0:
            with socket.create_connection((str(mine[0]), int(mine[1]))) as stranger:
                stranger.sendall(tcp_mailbox._HELLO.pack(b"0" * 32, 1))
            socket.create_connection((str(mine[0]), int(mine[1]))).close()
        return asked(transport, mine)

    monkeypatch.setattr(tcp_mailbox, "_all_cards", told)
    with _mailboxes(2) as boxes:
        boxes[0].serve(_echo)
        assert torch.equal(boxes[1].ask(0, 7, _letter(3), 3), _letter(3, 1))


def test_who_cannot_be_reached_is_named_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        nobody = door.getsockname()[1]
    asked = tcp_mailbox._all_cards

    def told(transport: InProcess, mine: list[str | int]) -> list[list[str | int]]:
        return [["127.0.0.1", nobody, "0" * 32] for _ in asked(transport, mine)]

    monkeypatch.setattr(tcp_mailbox, "_all_cards", told)
    match = r"cannot reach rank \d at 127.0.0.1:\d+ \(Connection refused\); set GLOO_SOCKET_IFNAME"
    with pytest.raises(LaunchError, match=match):
        in_process(2, lambda transport: open_mailbox(transport, 1.0))
