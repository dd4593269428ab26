"""The workers' own connections: everything to all at once, and what is said where a peer fails."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from io import StringIO
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic import FrameError, LaunchError, PeerError
from laconic.transport import Group, own_group, sockets, world
from laconic.transport.connection import Connection
from laconic.transport.mesh import Mesh
from laconic.transport.rendezvous import Acceptor
from tests.workers import WorkerPool

ADDED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, socket.socket]]:
    """Rank 0's end of a mesh of two, and the bare socket that it takes for rank 1."""
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        link = _Local(mine)
        yield Mesh(0, {1: link}, timeout_s=0.2), theirs
        link.close()


@pytest.fixture(autouse=True, params=["native", "python"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes move natively, where that is built, and by Python alike."""
    if request.param == "python":
        monkeypatch.setattr(sockets, "library", lambda: None)


class _Local(Connection):
    """A connection between two ends in this process, which has no options of TCP."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link


@pytest.mark.parametrize("length", [41, -4, 1 << 60])
def test_a_length_that_cannot_be_names_its_sender(pair: tuple[Mesh, socket.socket], length: int) -> None:
    mesh, theirs = pair
    theirs.send(length.to_bytes(8, "little", signed=True))
    with pytest.raises(FrameError, match=f"from rank 1 says it has {length} bytes of 40"):
        mesh.all_to_all_v([torch.zeros(4, dtype=torch.uint8)] * 2, [40] * 2)
    with pytest.raises(PeerError, match="rank 1 is gone"):  # who fails hangs up, for good
        mesh.all_to_all_v([torch.zeros(4, dtype=torch.uint8)] * 2, [40] * 2)


def test_who_hangs_up_and_who_says_nothing_is_named(pair: tuple[Mesh, socket.socket]) -> None:
    mesh, theirs = pair
    rows = torch.zeros(2, 100_000, dtype=torch.uint8)
    with pytest.raises(PeerError, match=r"rank 1 has sent nothing for 0\.2 s"):
        mesh.all_gather(rows[0].clone(), rows)
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerError, match="rank 1 is gone, or gave up this step"):
        mesh.all_gather(rows[0].clone(), rows)


def test_who_trickles_has_one_deadline_for_a_message(pair: tuple[Mesh, socket.socket]) -> None:
    mesh, theirs = pair
    over = threading.Event()

    def trickle() -> None:
        for _ in range(100):  # ten times as long as a message may take
            theirs.send(b"x")
            if over.wait(0.02):
                return

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(trickle)
        rows = torch.zeros(2, 100, dtype=torch.uint8)
        with pytest.raises(PeerError, match=r"rank 1 is not through with a message after 0\.2 s"):
            mesh.all_gather(rows[0].clone(), rows)
        over.set()
        done.result()


def test_frames_larger_than_what_a_link_holds_cross_both_ways_at_once() -> None:
    ends = socket.socketpair(socket.AF_UNIX)
    frames = [torch.randint(0, 256, (3_000_001,), dtype=torch.uint8) for _ in ends]
    heard = [torch.empty(2, frames[0].numel(), dtype=torch.uint8) for _ in ends]
    meshes = [Mesh(rank, {1 - rank: _Local(end)}, timeout_s=30) for rank, end in enumerate(ends)]
    threads = [threading.Thread(target=meshes[rank].all_gather, args=(frames[rank], heard[rank])) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mesh, rows in zip(meshes, heard, strict=True):
        assert torch.equal(rows, torch.stack(frames))
        mesh.close()


def _ends(num_workers: int) -> list[Mesh]:
    """All ends of a mesh, in this process."""
    links: list[dict[int, Connection]] = [{} for _ in range(num_workers)]
    for one, other in combinations(range(num_workers), 2):
        mine, theirs = map(_Local, socket.socketpair(socket.AF_UNIX))
        links[one][other], links[other][one] = mine, theirs
    return [Mesh(rank, links[rank], timeout_s=30) for rank in range(num_workers)]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_messages_of_any_length_reach_whom_they_are_for(num_workers: int) -> None:
    """Also longer ones than any before, and empty ones."""
    meshes = _ends(num_workers)
    for length in (5, 0, 3_000_001, 200_000):
        said = [
            [torch.randint(0, 256, (length + to if length else 0,), dtype=torch.uint8) for to in range(num_workers)]
            for _ in meshes
        ]
        with ThreadPoolExecutor(num_workers) as pool:
            heard = list(pool.map(Mesh.all_to_all_v, meshes, said, [[3_000_010] * num_workers] * num_workers))
        for to, messages in enumerate(heard):
            assert all(torch.equal(message, said[sender][to]) for sender, message in enumerate(messages))
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("dtype", ADDED, ids=str)
def test_sums_in_hops_are_those_of_virtual_workers_bit_for_bit(dtype: torch.dtype, num_workers: int) -> None:
    meshes = _ends(num_workers)
    for count in (1, 5, 30_001):  # fewer than workers, shares that differ
        torch.manual_seed(count)
        vectors = [torch.randn(count, dtype=torch.float64).mul(100).to(dtype) for _ in meshes]
        want = reduce(torch.add, vectors)
        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(Mesh.all_reduce_, meshes, vectors))
        for got in vectors:
            assert torch.equal(got, want)
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # added natively and by torch
def test_who_fails_in_a_sum_is_named(pair: tuple[Mesh, socket.socket], dtype: torch.dtype) -> None:
    mesh, theirs = pair
    vector = torch.ones(3, dtype=dtype)  # of which two are rank 0's share
    with pytest.raises(PeerError, match=r"rank 1 has sent nothing for 0\.2 s"):
        mesh.all_reduce_(vector)
    theirs.send(bytes(1))
    with pytest.raises(PeerError, match=r"rank 1 is not through with a message after 0\.2 s"):
        mesh.all_reduce_(vector)
    theirs.send(bytes(2 * vector.element_size()))
    with pytest.raises(PeerError, match=r"rank 1 has sent nothing for 0\.2 s"):  # in the second hop
        mesh.all_reduce_(vector)
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerError, match="rank 1 is gone, or gave up this step"):
        mesh.all_reduce_(vector)


def _summed(entries: int, how: str) -> tuple[Tensor, Tensor, bool]:
    """A sum by a group and by its backend, and whether connections of our own were opened for it."""
    cpu = torch.device("cpu")
    group = Group(own_group(world(), cpu), cpu)
    ours = torch.randn(entries, generator=torch.Generator().manual_seed(dist.get_rank()))
    backends = ours.clone()
    getattr(group, how)(ours, "kind")
    dist.all_reduce(backends)
    has_mesh = "_mesh" in vars(group)
    group.close()
    return ours, backends, has_mesh


def test_small_sums_take_hops_and_long_and_dense_ones_are_the_backends(four_workers: WorkerPool) -> None:
    cases = ((10_001, "all_reduce_", True), (100_000, "all_reduce_", False), (10_001, "sum_gradients_", False))
    for entries, how, in_hops in cases:
        told = four_workers.run(_summed, entries, how)
        for ours, backends, has_mesh in told:
            assert has_mesh == in_hops and torch.equal(ours, told[0][0])
            torch.testing.assert_close(ours, backends, atol=1e-5 if in_hops else 0, rtol=0)  # ulps of up to 16


def test_ports_are_those_that_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("LACONIC_PORTS", f"{port}-{port}")
        with pytest.raises(LaunchError, match=f"^all ports of LACONIC_PORTS={port}-{port} are taken at 127.0.0.1; n"):
            Acceptor(1)
    acceptor = Acceptor(1)
    assert acceptor.address.port == port
    acceptor.close()
    monkeypatch.setenv("LACONIC_PORTS", "http")
    with pytest.raises(LaunchError, match="write it as 20000-20099"):
        Acceptor(1)


def _gathered_without_own_connections() -> tuple[Tensor, list[str]]:
    """Rank 1 finds no address of its own."""
    cpu = torch.device("cpu")
    log = StringIO()
    handler = logging.StreamHandler(log)
    os.environ["LACONIC_PORTS"] = "none" if dist.get_rank() == 1 else "0-0"
    try:
        group = Group(own_group(world(), cpu), cpu)
        logging.getLogger("laconic.transport").addHandler(handler)
        everyone = group.all_gather(torch.tensor([dist.get_rank()], dtype=torch.uint8), "frame")
        return everyone, [line for line in log.getvalue().splitlines() if "Gloo" in line]
    finally:
        logging.getLogger("laconic.transport").removeHandler(handler)
        del os.environ["LACONIC_PORTS"]


def test_where_one_cannot_be_called_all_go_through_the_group(four_workers: WorkerPool) -> None:
    told = four_workers.run(_gathered_without_own_connections)
    for everyone, _ in told:
        assert everyone.flatten().tolist() == [0, 1, 2, 3]
    (line,) = (line for _, said in told for line in said)
    assert line.startswith("frames go through Gloo") and "LACONIC_PORTS" in line and "\n" not in line
