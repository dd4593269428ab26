"""Dedicated servers and their workers when something goes wrong between them: silence, strangers, leaving early."""

from __future__ import annotations

import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from laconic.errors import FrameError, ServerLostError
from laconic.layout import Layout
from laconic.replicas import Follower, OuterRounds, consensus, gather
from laconic.server.client import ServerClient, sum_over, with_layout, without_layout
from laconic.server.listener import Listener
from laconic.server.owner import Owner
from laconic.server.serve import _RequestHandler
from laconic.transport import Push, connect, sockets
from laconic.transport.connection import Connection, Kind, Message, payload_of, views_of
from laconic.wire import FrameShape
from laconic_lab.train import Job, verdict
from laconic_lab.train.launch import await_codes, first_failure, local_store
from tests.parts import made
from tests.replicas.test_rounds import outer
from tests.transport.test_connection import trickle


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def _socket(link: Connection) -> socket.socket:
    """The socket under a connection, without our framing."""
    return socket.socket(fileno=os.dup(link.fileno()))


def _talk(
    num_workers: int,
    timeout_s: float,
    work: Callable[[ServerClient], None],
    longest: int = 1 << 20,
    wait_budget_s: float = math.inf,
    rude: Callable[[Connection], None] | None = None,
    rude_rank: int = 0,
) -> tuple[Listener, dict[int, str]]:
    """(the listener afterwards, what went wrong by rank) of workers that only add up; one may misbehave."""
    listener = Listener(num_workers, timeout_s, wait_budget_s=wait_budget_s)
    listener.longest = longest
    wrong: dict[int, str] = {}
    server = serve_totals(listener)

    def one(rank: int) -> None:
        try:
            if rude is not None and rank == rude_rank:
                link = connect(listener.address, rank, "server 0", timeout_s)
                rude(link)
                link.close()
                return
            served = ServerClient(rank, num_workers, [listener.address], "", timeout_s, longest)
            work(served)
            served.close()
        except Exception as error:
            wrong[rank] = str(error)

    workers = [threading.Thread(target=one, args=(rank,)) for rank in range(num_workers)]
    for thread in workers:
        thread.start()
    for thread in [*workers, server]:
        thread.join(30)
        assert not thread.is_alive()
    return listener, wrong


def _without_layout(message: Message) -> Tensor:
    return without_layout(message.payload, 8)[1] if message.kind == Kind.LAYOUT else message.payload


def serve_totals(listener: Listener) -> threading.Thread:
    """A server that adds up until its workers are done."""

    def run() -> None:
        listener.accept()
        while heard := listener.receive_round(lambda rank, message: None):
            about = next(iter(heard.values()))
            adds = about.kind in (Kind.SUM, Kind.TOTAL, Kind.LAYOUT, Kind.PARTS)
            parts = [_without_layout(message) for message in heard.values()]
            listener.reply(torch.stack(parts).sum(0, dtype=parts[0].dtype) if adds else payload_of(b""), about)
            if about.kind == Kind.CLOSE:
                break
        listener.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("silent", [{0}, {3}, {0, 1}, {2, 3}])
def test_silent_workers_are_left_behind_and_the_others_go_on(silent: set[int]) -> None:
    sums: dict[int, list[float]] = {}
    others_go_on = threading.Barrier(4)

    def work(served: ServerClient) -> None:
        sums[served.rank] = [float(served.total(torch.ones(1)))]
        if served.rank in silent:
            others_go_on.wait(20)
        sums[served.rank].append(float(served.total(torch.ones(1))))
        others_go_on.wait(20)

    listener, wrong = _talk(4, 1, work)
    assert set(wrong) == set(listener.lost) == silent
    assert all(listener.lost[rank] == "was silent for 1 s before the first step" for rank in silent)
    assert all(sums[rank] == [4, 4 - len(silent)] for rank in {0, 1, 2, 3} - silent)


@pytest.mark.parametrize("slow", [0, 1])
def test_who_trickles_is_lost_and_not_who_waits(slow: int) -> None:
    stop = threading.Event()
    sums: list[float] = []

    def rude(link: Connection) -> None:
        message = b"".join(bytes(view) for view in views_of(Message(Kind.TOTAL, payload=torch.ones(100))))
        trickle(_socket(link), message, stop)

    def work(served: ServerClient) -> None:
        sums.extend(float(served.total(torch.ones(1))) for _ in range(2))
        stop.set()

    listener, wrong = _talk(2, 0.4, work, rude=rude, rude_rank=slow)
    assert not wrong and sums == [1, 1]
    assert listener.lost == {slow: "was slow to send for 0.4 s before the first step"}


def test_who_takes_nothing_of_its_answer_is_lost_and_the_others_have_theirs() -> None:
    others_go_on = threading.Event()
    sums: list[float] = []

    ones = torch.ones(2_000_000)

    def rude(link: Connection) -> None:
        link.send(Message(Kind.TOTAL, payload=ones))
        others_go_on.wait(20)

    def work(served: ServerClient) -> None:
        sums.extend(float(served.total(ones)[-1]) for _ in range(2))
        others_go_on.set()

    listener, wrong = _talk(2, 1.5, work, longest=1 << 23, rude=rude)
    assert not wrong and sums == [2, 1]
    assert listener.lost == {0: "was slow to take a reply for 1.5 s before the first step"}


def test_who_says_a_length_that_cannot_be_is_lost_in_one_line() -> None:
    sums: list[float] = []

    def rude(link: Connection) -> None:
        _socket(link).sendall(struct.pack("<2sBBHHiiqq", b"LC", Kind.PARTS, 0, 0, 0, 0, 0, 1 << 45, 0))
        assert _socket(link).recv(1) == b""

    def work(served: ServerClient) -> None:
        sums.append(float(served.total(torch.ones(1))))

    listener, wrong = _talk(2, 20, work, rude=rude)
    assert not wrong and sums == [1]
    assert listener.lost == {
        0: f"sent parts of {1 << 45} bytes, of at most {listener.longest} before the first step",
    }


def _layout(text: bytes, part: bytes = bytes(64)) -> Tensor:
    return payload_of(struct.pack("<q", len(text)) + text + part)


OWNER = Owner(made("overlap"), 0, 1)
GOOD = with_layout(
    Layout.of(["w"], [8]),
    FrameShape(8, 0, 0, OWNER.scheme.frame_code).write_overflow(torch.device("cpu"), step=0, bucket=0),
)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Kind.LAYOUT, GOOD, payload_of(bytes(3))),
        (Kind.LAYOUT, GOOD, payload_of(struct.pack("<q", 1 << 40))),
        (Kind.LAYOUT, GOOD, _layout(b"{}")),
        (Kind.LAYOUT, GOOD, _layout(b"[]")),
        (Kind.LAYOUT, GOOD, _layout(b"7")),
        (Kind.LAYOUT, GOOD, _layout(b'[["w", "8"]]')),
        (Kind.LAYOUT, GOOD, _layout(b'[["w", 8, 9]]')),
        (Kind.LAYOUT, GOOD, _layout(b'[["w", 1099511627776]]')),
        (Kind.LAYOUT, GOOD, _layout(b"\xff\xfe")),
        (Kind.LAYOUT, GOOD, _layout(b'[["v", 8]]')),
        (Kind.LAYOUT, GOOD, torch.ones(9)),
        (Kind.PARTS, payload_of(bytes(64)), payload_of(bytes(64))),
        (Kind.SUM, torch.ones(3), torch.ones(4)),
        (Kind.TOTAL, torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (Kind.LOAD, payload_of(b""), payload_of(b"no state")),
    ],
)
def test_a_malformed_message_is_a_refusal_that_names_its_sender(kind: Kind, good: Tensor, bad: Tensor) -> None:
    listener = Listener(2, 20)
    told: dict[int, str] = {}
    good_arrived = threading.Event()

    def work(rank: int, said: Tensor) -> None:
        link = connect(listener.address, rank, "server 0", 20)
        if rank == 1:
            good_arrived.wait(20)
        link.send(Message(kind, 0, 0, said))
        told[rank] = link.receive({Kind.ERROR: 1 << 16}, 20).text.decode()
        link.close()

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work, rank, said) for rank, said in enumerate([good, bad])]
        listener.accept()
        handler = _RequestHandler(listener, OWNER, dict, pool)
        receive = listener.receive_round

        def receive_and_note(on_arrival: Callable[[int, Message], None]) -> dict[int, Message]:
            def note_arrived(rank: int, message: Message) -> None:
                on_arrival(rank, message)
                good_arrived.set()

            return receive(note_arrived)

        listener.receive_round = receive_and_note  # type: ignore[method-assign]
        with pytest.raises(FrameError, match="sent"):
            handler.handle_round()
        listener.close()
    for done in working:
        done.result()
    assert told[0] == told[1] and "\n" not in told[0]
    assert told[0].startswith("worker 0 sent parts of step 0" if kind == Kind.PARTS else "worker 1 sent")


def test_a_step_may_take_longer_than_the_timeout_if_it_does_so_for_all() -> None:
    def work(served: ServerClient) -> None:
        time.sleep(1)
        served.total(torch.ones(1))

    listener, wrong = _talk(2, 0.5, work)
    assert not wrong and not listener.lost


def test_who_is_done_does_not_hurry_the_others() -> None:
    def work(served: ServerClient) -> None:
        time.sleep(1 if served.rank else 0)

    listener, wrong = _talk(2, 0.3, work)
    assert not wrong and 1 not in listener.lost


@pytest.mark.parametrize("early", [{0}, {1}, {0, 1}])
def test_who_closes_early_leaves_the_others_to_go_on(early: set[int]) -> None:
    sums: dict[int, list[float]] = {}

    def work(served: ServerClient) -> None:
        sums[served.rank] = [float(served.total(torch.ones(1))) for _ in range(1 if served.rank in early else 3)]

    listener, wrong = _talk(3, 20, work)
    assert not wrong and set(listener.lost) == early
    assert all(sums[rank] == [3, 3 - len(early), 3 - len(early)] for rank in {0, 1, 2} - early)


def _push(served: ServerClient, step: int, said: Tensor) -> Push:
    push = Push(Layout.of(["w"], [8]), step, 0, [said], [said.nbytes])
    served.push(push)
    return push


def test_who_is_lost_after_one_step_made_one() -> None:
    part = torch.zeros(8, dtype=torch.uint8)
    is_gone = threading.Event()

    def work(served: ServerClient) -> None:
        served.pull(_push(served, 0, part), None)
        if served.rank == 1:
            served.shut_down()
            is_gone.set()
        elif is_gone.wait(20):
            served.total(torch.ones(1))

    listener, _ = _talk(2, 20, work)
    assert listener.lost == {1: "is gone after 1 step"}


@pytest.mark.parametrize("built", [True, False])
def test_parts_may_be_on_their_way_while_answers_are(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    if not built:
        monkeypatch.setattr(sockets, "library", lambda: None)
    parts = [torch.full((6_000_000,), step, dtype=torch.uint8) for step in range(5)]  # more than sockets hold
    answers: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(served: ServerClient) -> None:
        pushed = [_push(served, step, part) for step, part in enumerate(parts[:2])]
        for step, part in enumerate(parts[2:], start=2):
            answers[served.rank] += served.pull(pushed[step - 2], None)
            pushed.append(_push(served, step, part))
        total = float(served.total(torch.ones(1)))  # whose answer comes behind those
        answers[served.rank] += [served.pull(push, None)[0] for push in pushed[-2:]]
        assert total == 2

    _, wrong = _talk(2, 20, work, longest=1 << 23)
    assert not wrong
    for heard in answers.values():
        assert all(torch.equal(answer, 2 * part) for answer, part in zip(heard, parts, strict=True))


def test_who_has_sent_more_hears_what_went_wrong_before_that() -> None:
    part = torch.zeros(75_000, dtype=torch.uint8)  # of which some waits in the server's kernel, as on a slow link
    failed = threading.Event()
    listener = Listener(2, 20)
    listener.longest = part.nbytes + 100  # of a layout

    def work(rank: int) -> None:
        served = ServerClient(rank, 2, [listener.address], "", 20, listener.longest)
        _socket(served._servers[0].link).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        pushed = [_push(served, step, part) for step in range(3)]
        failed.wait(20)
        with pytest.raises(FrameError, match="server 0: nobody may say that"):
            for push in pushed:
                served.pull(push, None)
        served.shut_down()

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, rank) for rank in range(2)]
        listener.accept()
        listener.reply(part, listener.receive_round(lambda rank, message: None)[0])
        listener.receive_round(lambda rank, message: None)
        threading.Timer(0.5, failed.set).start()
        with pytest.raises(FrameError):
            listener.fail(FrameError("nobody may say that"))
        listener.close()
    assert all(done.result() is None for done in working)


def test_who_has_more_to_compute_takes_its_answer_meanwhile() -> None:
    answered = threading.Event()

    def work(served: ServerClient) -> None:
        push = _push(served, 0, torch.ones(16_000_000, dtype=torch.uint8))  # more than a socket holds
        while not answered.wait(0.1):
            served.receive_pending()
            if served._servers[0].replies:
                answered.set()
        time.sleep(1.5)  # longer than the timeout
        assert int(served.pull(push, None)[0][-1]) == 1

    listener, wrong = _talk(1, 1, work, longest=1 << 24)
    assert not wrong and not listener.lost


def test_who_fails_between_two_servers_hangs_up_without_a_word() -> None:
    listeners = [Listener(1, 20) for _ in range(2)]
    part = torch.zeros(20_000_000, dtype=torch.uint8)

    def work() -> None:
        served = ServerClient(0, 1, [listener.address for listener in listeners], "", 20)
        with pytest.raises(ServerLostError, match="server 0 is gone"):
            served.push(Push(Layout.of(["w"], [8]), 0, 0, [part, part], [part.nbytes] * 2))
        served.close()  # without a goodbye, which the second server would take for a piece of its part

    worker = threading.Thread(target=work)
    worker.start()
    for listener in listeners:
        listener.longest = 2 * part.nbytes
        listener.accept()
    listeners[0].close()
    worker.join(20)
    assert not worker.is_alive()
    assert not listeners[1].receive_round(lambda rank, message: None) and listeners[1].lost == {
        0: "is gone before the first step"
    }
    listeners[1].close()


@pytest.mark.parametrize("wait_budget_s", [1.0, math.inf])
def test_who_takes_its_answer_in_drops_holds_up_nobody(wait_budget_s: float) -> None:
    stop = threading.Event()
    sums: list[float] = []

    ones = torch.ones(4_000_000)

    def rude(link: Connection) -> None:
        link.send(Message(Kind.SUM, payload=ones))
        while not stop.wait(0.05):
            _socket(link).recv(10_000)

    def work(served: ServerClient) -> None:
        served.sum_gradients_(total := ones.clone(), "dense")
        sums.append(float(total[-1]))
        stop.set()

    listener, wrong = _talk(2, 1, work, longest=1 << 24, wait_budget_s=wait_budget_s, rude=rude)
    assert not wrong and sums == [2]
    assert listener.lost == {0: "was slow to take a reply for 1 s before the first step"}


def test_who_is_late_and_closes_ends_nobody() -> None:
    one = torch.ones(8, dtype=torch.uint8)
    others_went_on = threading.Event()

    def work(served: ServerClient) -> None:
        if served.rank == 0:
            for step in range(2):
                served.pull(_push(served, step, one), None)
            others_went_on.set()
        else:
            others_went_on.wait(20)

    listener, wrong = _talk(2, 20, work, wait_budget_s=0.1)
    assert not wrong and set(listener.lost) <= {1}


def test_nobody_is_lost_while_its_answer_waits_for_those_of_others() -> None:
    large = torch.zeros(8_000_000, dtype=torch.uint8)  # more than a socket holds
    others_wait = threading.Event()
    listener = Listener(2, 20)
    listener.longest = large.nbytes

    def work(rank: int) -> None:
        link = connect(listener.address, rank, "server 0", 20)
        link.send(Message(Kind.TOTAL, payload=large))
        if rank == 0:  # whose answer leaves first
            others_wait.wait(20)
        link.receive({Kind.TOTAL: large.nbytes}, 20)
        link.send(Message(Kind.CLOSE))
        link.receive({Kind.CLOSE: 0}, 20)
        link.close()

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, rank) for rank in range(2)]
        listener.accept()
        heard = listener.receive_round(lambda rank, message: None)
        listener.reply(large, heard[0])
        listener._workers[1].awaited_since = time.monotonic() - 2 * listener.timeout_s
        lost_at = listener._lost_at(1)
        others_wait.set()
        closing = listener.receive_round(lambda rank, message: None)
        listener.reply(payload_of(b""), closing[0])
        listener.close()
    assert lost_at == math.inf and not listener.lost and all(done.result() is None for done in working)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, struct.pack("<2sBBHHiiqq", b"LC", 0, 0, 0, 0, 0, 0, 1 << 60, 0)]
)
def test_strangers_are_turned_away(said: bytes) -> None:
    listener = Listener(1, 20)
    server = serve_totals(listener)
    with socket.create_connection(listener.address[:2]) as stranger:
        stranger.sendall(said)
    served = ServerClient(0, 1, [listener.address], "", 20)
    assert torch.equal(served.total(torch.ones(3)), torch.ones(3))
    served.close()
    server.join(20)
    assert not server.is_alive()


def test_training_alone_is_counted() -> None:
    counts: list[tuple[int, int]] = []

    def work(served: ServerClient) -> None:
        served.total(torch.ones(1000))
        served.load_owner_states([bytes(5000)])
        counts.append((served.traffic.bytes_out, served.traffic.bytes_in))
        served.sum_gradients_(torch.ones(1000), "dense")
        counts.append((served.traffic.bytes_out, served.traffic.bytes_in))

    listener, wrong = _talk(1, 20, work)
    assert not wrong
    assert counts[0] == (0, 0) and 4000 < counts[1][0] < 4100 and 4000 < counts[1][1] < 4100
    assert listener.traffic.bytes_out == counts[1][1] and listener.traffic.bytes_in == counts[1][0]


def test_a_mean_is_over_those_whom_each_server_heard() -> None:
    heard = [3, 2]  # the second no longer heard the third worker
    replies = [Message(Kind.SUM, payload=torch.full((2,), float(living)), living=living) for living in heard]
    assert sum_over(replies, 3).tolist() == [3, 3, 3, 3]


def test_workers_that_are_all_here_meet_on_the_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_SECRET", raising=False)
    store = local_store()
    assert os.environ["LACONIC_SECRET"]
    torchruns = TCPStore("127.0.0.1", store.port, 1, is_master=True, multi_tenant=True)  # as its agent makes it
    torchruns.set("a", "b")
    assert store.get("a") == b"b"
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    listening = [row[1] for row in rows if row[1].endswith(f":{store.port:04X}") and row[3] == "0A"]
    assert listening == [f"0100007F:{store.port:04X}"]


def test_a_launcher_does_not_wait_for_a_server_whose_workers_all_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["laconic_lab.train.launch"], "LAST_LINES_S", 0.2)
    scripts = ["import time; time.sleep(60)", "raise SystemExit(1)", "raise SystemExit(1)"]
    processes = [subprocess.Popen([sys.executable, "-c", script]) for script in scripts]
    job = Job(scheme="overlap", servers=1, workers=2)
    try:
        codes = await_codes(processes, job)
    finally:
        processes[0].kill()
        processes[0].wait()
    assert codes == [None, 1, 1]
    assert verdict(codes, job) == 1 and first_failure(codes, job).startswith("worker 0 of 2 ended with exit code 1")


@pytest.mark.parametrize("at", ["gather", "evaluation", "average"])
@pytest.mark.parametrize("dead", [0, 1])
def test_who_dies_between_two_rounds_ends_nobody(dead: int, at: str) -> None:
    """Neither at an evaluation nor at an average: the row of a worker that is gone is not taken for its numbers."""
    scheme = outer("scheme:exchange=server,trigger=rounds(every=2)")
    listener = Listener(3, 10)
    has_died = threading.Event()

    def serve_rounds() -> None:
        listener.accept()
        with ThreadPoolExecutor(3) as readers:
            handler = _RequestHandler(listener, Owner(scheme.exchanged, 0, 1), dict, readers)
            while listener.living and handler.handle_round():
                pass

    def work(rank: int) -> tuple[list[list[float]], Tensor]:
        client = ServerClient(rank, 3, [listener.address], "", 10)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(rank))
        follower = Follower(OuterRounds(model, optimizer, scheme, client, in_background=False))
        for _ in range(2):
            follower.step()
        if rank == dead:
            client.shut_down()
            has_died.set()
            return [], torch.empty(0)
        has_died.wait(10)
        if at == "evaluation":
            consensus(follower)
        elif at == "average":
            follower.average_()
        rows = gather(follower, [10.0 + rank])
        follower.average_()
        follower.close()
        return rows, follower.vector.read()

    with ThreadPoolExecutor(4) as pool:
        serving = pool.submit(serve_rounds)
        results = list(pool.map(work, range(3)))
        serving.result(10)
    listener.close()
    living = [rank for rank in range(3) if rank != dead]
    assert all(results[rank][0] == [[10.0 + other] for other in living] for rank in living)
    assert torch.equal(*(results[rank][1] for rank in living))
