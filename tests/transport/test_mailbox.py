"""The mailbox between processes: questions, what all combine, and a peer that is slow, gone or a stranger."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from laconic.errors import LaunchError, PeerError
from laconic.transport import REQUEST_HEAD_BYTES, InProcess, TcpMailbox, in_process, open_mailbox
from laconic.transport.connection import Connection, Kind, Message
from laconic.transport.rendezvous import Address, connect
from tests.workers import wait_until


@contextmanager
def _mailboxes(num_workers: int, patience_s: float = 1.0, timeout_s: float = 60.0) -> Iterator[list[TcpMailbox]]:
    boxes = in_process(num_workers, lambda transport: open_mailbox(transport, patience_s, timeout_s))
    try:
        yield boxes
    finally:
        for box in boxes:
            box.close()


@contextmanager
def _linked(
    num_workers: int, patience_s: float = 1.0, timeout_s: float = 60.0
) -> Iterator[tuple[list[TcpMailbox], dict[tuple[int, int], socket.socket]]]:
    """Mailboxes, and by (who asks, whom) the asker's end of each TCP connection between them."""
    links: dict[tuple[int, int], socket.socket] = {}
    accepted: dict[tuple[int, int], socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0)) as acceptor:
        for pair in itertools.permutations(range(num_workers), 2):
            links[pair] = socket.create_connection(acceptor.getsockname())
            accepted[pair] = acceptor.accept()[0]
    boxes = []
    for rank in range(num_workers):
        to = {peer: Connection(link) for (asks, peer), link in links.items() if asks == rank}
        of = {asks: Connection(link) for (asks, peer), link in accepted.items() if peer == rank}
        boxes.append(TcpMailbox(rank, to, of, patience_s, timeout_s))
    try:
        yield boxes, links
    finally:
        for box in boxes:
            box.close()


def _bytes(count: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + count).to(torch.uint8)


def _echo(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
    return (message[:num_bytes] + peer).contiguous()


@pytest.mark.parametrize("count", [0, 1, 24, 1_000_003])
def test_a_question_is_answered_and_both_ends_count_the_same_bytes(count: int) -> None:
    with _mailboxes(3) as boxes:
        for box in boxes:
            box.listen(_echo)
        assert torch.equal(boxes[2].ask(0, 7, _bytes(count), count), _bytes(count, 2))
        assert torch.equal(boxes[0].ask(2, 7, _bytes(count), count // 2), _bytes(count // 2))
        head = REQUEST_HEAD_BYTES
        out = 2 * (head + count)
        back = count + count // 2
        # Who answers counts a moment after it was heard.
        assert wait_until(lambda: sum(box.traffic.bytes_out for box in boxes) == out + back)
        assert wait_until(lambda: sum(box.traffic.bytes_in for box in boxes) == out + back)
        assert boxes[1].traffic.bytes_out == 0


def test_who_answers_hears_when_an_answer_has_left() -> None:
    left = threading.Event()
    told: list[tuple[int, int]] = []

    def answered(peer: int, turn: int) -> None:
        told.append((peer, turn))
        left.set()

    with _mailboxes(2) as boxes:
        for box in boxes:
            box.listen(_echo, answered)
        boxes[1].ask(0, 7, _bytes(9), 9)
        assert left.wait(10) and told == [(1, 7)]


def test_a_peer_that_takes_its_time_holds_up_nobody_else() -> None:
    goes_on = threading.Event()

    def answer(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        if peer == 1:
            goes_on.wait()
        return message

    with _mailboxes(3) as boxes:
        for box in boxes:
            box.listen(answer)
        slow = threading.Thread(target=boxes[1].ask, args=(0, 7, _bytes(5), 5))
        slow.start()
        assert torch.equal(boxes[2].ask(0, 7, _bytes(9), 9), _bytes(9))
        assert slow.is_alive()
        goes_on.set()
        slow.join()


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).mean(0)


def test_all_who_combine_get_the_same_and_go_on_without_those_who_are_gone() -> None:
    with _mailboxes(4) as boxes:
        for box in boxes:
            box.listen(_echo)
        mine = [torch.full((2, 3), float(rank)) for rank in range(4)]

        def combine(*ranks: int) -> list[list[float]]:
            """What each of these is told, all at once."""
            with ThreadPoolExecutor(len(ranks)) as pool:
                told = [pool.submit(boxes[rank].combine_all, mine[rank], _mean, "average") for rank in ranks]
            return [done.result().tolist() for done in told]

        assert combine(0, 1, 2, 3) == [[1.5] * 6] * 4
        boxes[2].close()
        assert combine(0, 1, 3) == [[torch.tensor(4 / 3).item()] * 6] * 3
        boxes[0].close()  # who has combined for the others
        assert combine(1, 3) == [[2.0] * 6] * 2
        assert combine(1, 3) == [[2.0] * 6] * 2
        with pytest.raises(PeerError, match=r"rank 0 was lost before"):
            boxes[3].ask(0, 7, _bytes(1), 1)
        with pytest.raises(PeerError, match=r"rank 2 is gone \(.+\)"):
            boxes[3].ask(2, 7, _bytes(1), 1)


def test_who_missed_the_result_is_told_by_the_next_leader() -> None:
    with _linked(3) as (boxes, links):
        for box in boxes:
            box.listen(_echo)

        def combine(rank: int, value: float) -> list[float]:
            found: list[float] = boxes[rank].combine_all(torch.full((2,), value), _mean, None).tolist()
            return found

        links[2, 0].shutdown(socket.SHUT_RD)  # rank 2 gives, and never hears what rank 0 found
        with ThreadPoolExecutor(3) as pool:
            last = pool.submit(combine, 2, 6.0)
            first = [pool.submit(combine, 0, 0.0), pool.submit(combine, 1, 3.0)]
            assert [done.result() for done in first] == [[3.0] * 2] * 2
            boxes[0].close()
            second = pool.submit(combine, 1, 4.0)
            assert last.result() == [3.0] * 2
            assert combine(2, 6.0) == second.result() == [5.0] * 2


def test_a_worker_without_a_way_to_the_first_does_not_wait_for_ever() -> None:
    with _linked(3, patience_s=0.001) as (boxes, links):
        for box in boxes:
            box.listen(_echo)
        links[2, 0].shutdown(socket.SHUT_RDWR)  # while rank 1 waits for rank 0
        with pytest.raises(LaunchError, match="waited 0 s for rank 1 and has lost rank 0; mend its links"):
            boxes[2].combine_all(torch.zeros(1), _mean, None)


def test_a_peer_that_hangs_is_one_line_and_then_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with _linked(3, patience_s=0.2, timeout_s=2.0) as (boxes, _):
        boxes[1].listen(_echo)
        boxes[2].listen(_echo)  # while rank 0, the one that leads, hangs: its connections stand, and nothing comes
        with pytest.raises(PeerError, match=r"rank 0 has sent nothing for 2 s"):
            boxes[1].ask(0, 7, _bytes(4), 4)
        with ThreadPoolExecutor(2) as pool:
            told = [pool.submit(boxes[rank].combine_all, torch.tensor([float(rank)]), _mean, None) for rank in (1, 2)]
        assert [done.result().tolist() for done in told] == [[1.5]] * 2
    line = "rank 0 has sent nothing for 0.2 s; it is waited for, and dropped after 2"
    assert sorted(each for each in caplog.messages if line in each) == [f"rank {rank}: {line}" for rank in (1, 2)]


def test_a_peer_that_is_slow_but_lives_is_waited_for() -> None:
    goes_on = threading.Event()

    def answer(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        goes_on.wait()
        return message

    with _linked(2, patience_s=0.2, timeout_s=2.0) as (boxes, _):
        for box in boxes:
            box.listen(answer)
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(boxes[1].ask, 0, 7, _bytes(5), 5)
            time.sleep(2.5)
            assert not slow.done()
            goes_on.set()
            assert torch.equal(slow.result(), _bytes(5))


def test_an_answer_that_fails_is_logged_and_leaves_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    def fails(peer: int, turn: int, message: Tensor, num_bytes: int) -> Tensor:
        raise ZeroDivisionError

    with _mailboxes(2) as boxes:
        boxes[1].listen(fails)
        for _ in range(2):
            assert boxes[0].ask(1, 7, _bytes(4), 8).tolist() == [0] * 8
    assert caplog.text.count("Traceback") == 2


def test_who_does_not_speak_as_a_mailbox_does_is_hung_up_on() -> None:
    with _linked(2) as (boxes, links):
        boxes[1].listen(_echo)
        links[0, 1].sendall(b"x" * 100)
        with pytest.raises(PeerError, match="rank 1 is gone"):
            boxes[0].ask(1, 7, _bytes(4), 4)


@pytest.mark.parametrize(("length", "reply"), [(1 << 45, 0), (0, 1 << 45), (-1, 0)])
def test_a_peer_with_a_length_that_cannot_be_is_dropped(
    length: int, reply: int, caplog: pytest.LogCaptureFixture
) -> None:
    with _linked(2) as (boxes, links):
        boxes[1].listen(_echo)
        links[0, 1].sendall(struct.pack("<2sBBHHiiqq", b"LC", Kind.REQUEST, 0, 0, 0, 0, 7, length, reply))
        assert links[0, 1].recv(1) == b""
    what = f"rank 0 sent request of {max(length, reply)} bytes, of at most {1 << 20}"
    assert caplog.messages == [f"{what}; its messages are dropped from now on"]


def test_who_gives_something_else_to_combine_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with _linked(2) as (boxes, links):
        for box in boxes:
            box.listen(_echo)
        Connection(links[1, 0]).send(Message(Kind.COMBINE, 0, payload=torch.ones(3)))
        assert boxes[0].combine_all(torch.zeros(2), _mean, None).tolist() == [0, 0]
        assert links[1, 0].recv(1) == b""
    assert "rank 1 gave 12 bytes, not 8" in caplog.text


class _Overheard(InProcess):
    """A virtual worker's end that shows a test what is told of addresses, and lets it tell something else."""

    def __init__(self, inner: InProcess, tell: Callable[[int, list[Address]], list[Address]]) -> None:
        vars(self).update(vars(inner))
        self._tell = tell
        self._num_told = 0

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        everyone = super().all_gather(frame, kind)
        self._num_told += 1
        if self._num_told > 1:  # whether all have met
            return everyone
        told = self._tell(self.rank, [Address(*json.loads(bytes(row.tolist()))) for row in everyone])
        rows = [list(json.dumps(address).encode().ljust(frame.numel())) for address in told]
        return torch.tensor(rows, dtype=torch.uint8)


def test_a_stranger_is_not_let_in() -> None:
    def tell(rank: int, everyone: list[Address]) -> list[Address]:
        if rank == 1:
            with ThreadPoolExecutor(1) as beside:
                beside.submit(connect, everyone[0]._replace(token="0" * 32), 1, "rank 0", 5.0)
            socket.create_connection(everyone[0][:2]).close()
        return everyone

    boxes = in_process(2, lambda transport: open_mailbox(_Overheard(transport, tell), 1.0, 60.0))
    boxes[0].listen(_echo)
    assert torch.equal(boxes[1].ask(0, 7, _bytes(3), 3), _bytes(3, 1))
    for box in boxes:
        box.close()


def test_who_cannot_be_reached_is_named_with_what_to_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as acceptor:
        nobody = Address("127.0.0.1", acceptor.getsockname()[1], "0" * 32)
    match = r"cannot reach rank \d at 127.0.0.1:\d+ \(Connection refused\); set GLOO_SOCKET_IFNAME"
    with pytest.raises(LaunchError, match=match):
        in_process(2, lambda transport: open_mailbox(_Overheard(transport, lambda rank, all_: [nobody] * 2), 1.0, 60.0))
