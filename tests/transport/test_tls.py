"""TLS under our own connections: what is sent is heard, in other words on the wire, and only with the certificate."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from laconic import LaunchError
from laconic.transport import in_process, open_mailbox
from laconic.transport.connection import Connection, Kind, Message, payload_of
from laconic.transport.mesh import Mesh
from laconic.transport.rendezvous import Acceptor, connect
from laconic.transport.tls import certificate

ANY = dict.fromkeys(Kind, 1 << 23)


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """(certificate, key) of its own signing."""
    files = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", f"/CN={name}", "-days", "2", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(words, check=True, capture_output=True)
    return str(files[0]), str(files[1])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    return [make_certificate(tmp_path_factory.mktemp("tls"), name) for name in ("ours", "other")]


@pytest.fixture(autouse=True)
def _given(certificates: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("LACONIC_TLS_CERT", certificates[0][0])
    monkeypatch.setenv("LACONIC_TLS_KEY", certificates[0][1])


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    acceptor = Acceptor(1)
    with ThreadPoolExecutor(1) as beside:
        accepting = beside.submit(acceptor.accept, range(1), 10.0)
        here = connect(acceptor.address, 0, "it", 10.0)
        there = accepting.result()[0][0]
    acceptor.close()
    yield here, there
    here.close()
    there.close()


def test_messages_cross_both_ways_and_an_end_is_noticed(pair: tuple[Connection, Connection]) -> None:
    here, there = pair
    for count in (0, 1, 1_000_003):
        said = Message(Kind.SUM, 5, 3, torch.arange(count, dtype=torch.float32))
        with ThreadPoolExecutor(2) as beside:
            sending = [beside.submit(end.send, said) for end in pair]
            assert all(torch.equal(end.receive(ANY, 10).payload, said.payload) for end in pair)
            assert [done.result() for done in sending] == [said.num_bytes] * 2
    here.send(Message(Kind.CLOSE))
    here.close()
    assert there.receive(ANY, 10).kind == Kind.CLOSE
    with pytest.raises(ConnectionError):
        there.receive(ANY, 10)


def test_native_exchanges_go_through_it(pair: tuple[Connection, Connection]) -> None:
    frames = [torch.randint(0, 256, (3_000_001,), dtype=torch.uint8) for _ in pair]
    heard = [torch.empty(2, frames[0].numel(), dtype=torch.uint8) for _ in pair]
    meshes = [Mesh(rank, {1 - rank: end}, timeout_s=20) for rank, end in enumerate(pair)]
    with ThreadPoolExecutor(2) as beside:
        for done in [beside.submit(meshes[rank].all_gather, frames[rank], heard[rank]) for rank in range(2)]:
            done.result()
    assert all(torch.equal(rows, torch.stack(frames)) for rows in heard)


def test_nothing_crosses_in_clear() -> None:
    wires = socket.create_server(("127.0.0.1", 0))
    here = Connection(socket.create_connection(wires.getsockname()), None, certificate(accepts=False))
    with wires.accept()[0] as wire:
        here.send(Message(Kind.PARTS, payload=payload_of(b"in clear" * 100)))
        assert b"in clear" not in wire.recv(1 << 16)
    here.close()
    wires.close()


@pytest.mark.parametrize("theirs", ["other", "none"])
def test_who_has_another_certificate_or_none_is_turned_away(
    certificates: list[tuple[str, str]], theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    acceptor = Acceptor(1)
    with ThreadPoolExecutor(1) as beside:
        accepting = beside.submit(acceptor.accept, range(1), 1.0)
        shown, key = certificates[1] if theirs == "other" else ("", "")
        monkeypatch.setenv("LACONIC_TLS_CERT", shown)
        monkeypatch.setenv("LACONIC_TLS_KEY", key)
        with pytest.raises(LaunchError, match=r"rank 0 (cannot reach|and) it at"):
            connect(acceptor.address, 0, "it", 0.5)
        assert accepting.result() == {}
    acceptor.close()


def test_a_file_that_is_no_certificate_is_one_line_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_TLS_KEY", "/nowhere")
    with pytest.raises(LaunchError, match=r"LACONIC_TLS_KEY=/nowhere are no .*\(No such file or directory\); name two"):
        in_process(2, lambda transport: open_mailbox(transport, 1.0, 1.0))
