"""Framed messages over TCP: what is sent is heard, whatever its type and length, and strangers are turned away."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from laconic.errors import FrameError, LaunchError
from laconic.transport import rendezvous
from laconic.transport.connection import HEAD_BYTES, Connection, Kind, Message, payload_of
from laconic.transport.rendezvous import Acceptor, Address, connect

ANY = dict.fromkeys(Kind, 1 << 20)
TYPES = [torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def links() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as acceptor:
        here = socket.create_connection(acceptor.getsockname())
        there = acceptor.accept()[0]
    with here, there:
        yield here, there


def trickle(link: socket.socket, said: bytes, stop: threading.Event) -> None:
    """A byte every now and then, until it is over or all is said."""
    for byte in said:
        if stop.wait(0.05):
            return
        with suppress(OSError):
            link.send(bytes([byte]))


@pytest.mark.parametrize("timeout_s", [None, 5.0])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_message_arrives_as_it_was_sent(
    links: tuple[socket.socket, socket.socket], dtype: torch.dtype, timeout_s: float | None
) -> None:
    here, there = (Connection(link, timeout_s) for link in links)
    for count in (0, 1, 50_001):
        said = Message(Kind.SUM, 5, 3, torch.arange(count).to(dtype), 4, 2, 7)
        with_thread = threading.Thread(target=here.send, args=(said,))
        with_thread.start()
        heard = there.receive(ANY)
        with_thread.join()
        assert (heard.id, heard.living, heard.place, heard.reply_bytes) == (said.id, 4, 2, 7)
        assert heard.payload.dtype == dtype and torch.equal(heard.payload, said.payload)
        assert heard.num_bytes == HEAD_BYTES + count * dtype.itemsize


def test_what_is_no_message_is_refused(links: tuple[socket.socket, socket.socket]) -> None:
    links[0].sendall(b"GET / HTTP/1.1\r\n" * 2)
    with pytest.raises(FrameError, match="without a laconic header"):
        Connection(links[1]).receive(ANY)


def test_a_message_longer_than_allowed_is_refused_before_it_is_read(
    links: tuple[socket.socket, socket.socket],
) -> None:
    here, there = (Connection(link) for link in links)
    here.send(Message(Kind.HELLO, payload=payload_of(bytes(9))))
    with pytest.raises(FrameError, match="sent hello of 9 bytes, of at most 8"):
        there.receive({Kind.HELLO: 8})


@pytest.mark.parametrize("said", [{"length": 1 << 45}, {"length": -4}, {"reply": 1 << 45}, {"reply": -1}])
def test_no_length_is_believed(links: tuple[socket.socket, socket.socket], said: dict[str, int]) -> None:
    head = struct.pack("<2sBBHHiiqq", b"LC", Kind.PARTS, 0, 0, 0, 0, 0, said.get("length", 0), said.get("reply", 0))
    links[0].sendall(head)
    with pytest.raises(FrameError, match=f"sent parts of {max(0, *said.values())} bytes, of at most 1048576"):
        Connection(links[1]).receive(ANY)


def test_a_message_has_one_deadline_however_it_trickles(links: tuple[socket.socket, socket.socket]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=trickle, args=(links[0], bytes(HEAD_BYTES - 1), stop))
    thread.start()
    with pytest.raises(TimeoutError):
        Connection(links[1]).receive(ANY, timeout_s=0.2)
    stop.set()
    thread.join()


def test_half_a_message_is_an_error_when_its_sender_is_gone(links: tuple[socket.socket, socket.socket]) -> None:
    links[0].sendall(b"LC")
    links[0].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        Connection(links[1]).receive(ANY)


def test_a_slow_reader_is_not_a_silent_one(links: tuple[socket.socket, socket.socket]) -> None:
    got = []

    def read() -> None:
        while len(part := links[1].recv(1 << 18)):
            got.append(len(part))
            time.sleep(0.05)

    reader = threading.Thread(target=read)
    reader.start()
    num_bytes = Connection(links[0], 0.5).send(Message(Kind.PARTS, payload=payload_of(bytes(8 << 20))))  # some 2 s
    links[0].close()
    reader.join(20)
    assert sum(got) == num_bytes


@pytest.fixture
def acceptor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Acceptor]:
    """An acceptor on the loopback that gives a handshake 0.3 s."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 0.3)
    opened = Acceptor(5)
    yield opened
    opened.close()


def test_only_those_who_know_the_key_come_in_and_each_once(acceptor: Acceptor, monkeypatch: pytest.MonkeyPatch) -> None:
    told = acceptor.address
    with ThreadPoolExecutor(1) as beside:
        accepting = beside.submit(acceptor.accept, range(2), 1.0)  # rank 7 is none of theirs, and rank 0 does not come
        with pytest.raises(LaunchError, match=r"rank 0 and it at 127.0.0.1:\d+ do not know the same secret; give both"):
            connect(told._replace(token="0" * 32), 0, "it", 5.0)
        with monkeypatch.context() as other, pytest.raises(LaunchError, match="do not know the same secret"):
            other.setenv("LACONIC_SECRET", "who was told the token still needs it")
            connect(told, 0, "it", 5.0)
        calls = [connect(told, rank, "it", 5.0, f"{rank}!") for rank in (7, 1, 1)]
        accepted = accepting.result()
    assert {rank: terms for rank, (_, terms) in accepted.items()} == {1: "1!"}
    calls[1].send(Message(Kind.PARTS, step=4))
    assert str(accepted[1][0].receive(ANY)) == "parts of step 4, bucket -1"
    for connection in (*calls, accepted[1][0]):
        connection.close()
    acceptor.close()
    with pytest.raises(LaunchError, match=r"rank 3 cannot reach server 0 at 127.0.0.1:\d+ \(Connection refused\)"):
        connect(told, 3, "server 0", 5.0)


def test_who_answers_must_know_the_key_as_well() -> None:
    def impostor(acceptor: socket.socket) -> None:
        with acceptor.accept()[0] as link:
            link.sendall(bytes(32))
            assert len(link.recv(100)) == 68
            link.sendall(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as acceptor, ThreadPoolExecutor(1) as beside:
        answering = beside.submit(impostor, acceptor)
        with pytest.raises(LaunchError, match="do not know the same secret"):
            connect(Address("127.0.0.1", acceptor.getsockname()[1], "0" * 32), 0, "it", 5.0)
        answering.result()


def test_strangers_who_trickle_or_stay_hold_up_nobody(acceptor: Acceptor) -> None:
    stop = threading.Event()
    strangers = [socket.create_connection(acceptor.address[:2]) for _ in range(4)]
    threads = [threading.Thread(target=trickle, args=(link, bytes(500), stop)) for link in strangers[:2]]
    for thread in threads:
        thread.start()
    with ThreadPoolExecutor(1) as beside:
        accepting = beside.submit(acceptor.accept, range(2), 20.0)
        calls = [connect(acceptor.address, rank, "it", 5.0) for rank in range(2)]
        accepted = accepting.result()
    assert accepted.keys() == {0, 1} and any(thread.is_alive() for thread in threads)
    stop.set()
    for thread in threads:
        thread.join()
    for link in (*calls, *(link for link, _ in accepted.values())):
        link.close()
    for stranger in strangers:
        stranger.close()


def test_accepting_has_an_end_whoever_calls(acceptor: Acceptor) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(1) as beside, socket.create_connection(acceptor.address[:2]) as stranger:
        trickling = beside.submit(trickle, stranger, bytes(500), stop)
        assert acceptor.accept(range(1), 0.5) == {} and not trickling.done()
        stop.set()
