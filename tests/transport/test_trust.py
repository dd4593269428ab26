"""What all ranks must prove, and what of theirs travels how: a listener on the wire sees every byte."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from laconic import Follower, LaunchError, PeerError, Session, attach, follow, serve
from laconic.layout import Bucket, Layout
from laconic.transport import Group, own_group, world
from tests.gossiping import Small
from tests.parts import made
from tests.transport.test_tls import make_certificate
from tests.workers import WorkerPool

CPU = torch.device("cpu")
TIMEOUT_S = 20.0
SERVED = "scheme:exchange=server,trigger=rounds(every=2)"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    return [make_certificate(tmp_path_factory.mktemp("tls"), name) for name in ("ours", "other")]


@contextmanager
def _given(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables of this process, while the block runs."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _failure(kind: str, certificates: list[tuple[str, str]], other: int, *, served: bool) -> tuple[str, float]:
    """The error of a rank where one of them has another secret or certificate, or none; and the seconds it took."""
    is_other = dist.get_rank() == other
    variables = {"LACONIC_SECRET": "other" if is_other else "ours"}
    if "certificate" in kind:
        variables = dict(zip(("LACONIC_TLS_CERT", "LACONIC_TLS_KEY"), certificates[is_other], strict=True))
    since = time.monotonic()
    with _given({} if is_other and kind.startswith("no ") else variables):
        try:
            if not served:
                Group(own_group(world(), CPU, TIMEOUT_S), CPU).sum_gradients_(torch.zeros(9), "dense")
            elif dist.get_rank() == 0:
                serve(SERVED, servers=[0], timeout_s=TIMEOUT_S)
            else:
                model = Small()
                follow(model, torch.optim.SGD(model.parameters(), lr=0.1), SERVED, servers=[0], timeout_s=TIMEOUT_S)
        except LaunchError as error:
            return str(error), time.monotonic() - since
    return "", 0.0


def _failures(certificates: list[tuple[str, str]]) -> list[tuple[str, str, float]]:
    cases = [
        (kind, other, False) for kind in ("secret", "no secret", "certificate", "no certificate") for other in (0, 3)
    ]
    cases += [("secret", 0, True), ("certificate", 0, True), ("certificate", 3, True)]
    return [(kind, *_failure(kind, certificates, other, served=served)) for kind, other, served in cases]


def test_a_failed_proof_is_an_error_on_all_ranks_at_once(
    certificates: list[tuple[str, str]], fresh_workers: WorkerPool
) -> None:
    for failures in fresh_workers.run(_failures, certificates, timeout_s=120):
        for kind, error, seconds in failures:
            cause = "LACONIC_SECRET" if "secret" in kind else "LACONIC_TLS_CERT"
            assert cause in error and "\n" not in error and seconds < TIMEOUT_S / 2, (kind, error, seconds)


def _follow_one_who_is_killed() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _followed("local:every=9")
    except PeerError as error:
        return str(error)
    return ""


def test_a_kill_while_others_call_follow_is_one_line() -> None:
    pool = WorkerPool(3)
    try:
        for pipe in pool.pipes:
            pipe.send((_follow_one_who_is_killed, ()))
        for rank in (0, 2):
            assert pool.pipes[rank].poll(60), "it hangs"
            is_done, error = pool.pipes[rank].recv()
            assert is_done and error.startswith(f"rank {rank} cannot go on: a peer has ended") and "\n" not in error
    finally:
        pool.close()


# A float32 whose halves are alike, so that float32 and bf16 both show it, with either sign: no other text is like it.
MARK = struct.unpack("<f", b"\x9a\x3e\x9a\x3e")[0]
MARKS = [bytes(pattern) * 16 for pattern in (b"\x9a\x3e\x9a\x3e", b"\x9a\x3e\x9a\xbe", b"\x9a\xbe\x9a\xbe")]
MARKS += [struct.pack("<e", MARK / 2) * 32]  # as PyTorch's fp16 hook sends it, which divides first


class _Listener:
    """Whether a mark crosses the loopback while the block runs, in a packet of anybody."""

    def __enter__(self) -> _Listener:
        self.hears = False
        self._is_over = False
        self._wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.ntohs(3))  # of every protocol
        self._wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        self._wire.bind(("lo", 0))
        self._wire.settimeout(0.1)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        return self

    def _listen(self) -> None:
        while True:
            try:
                packet = self._wire.recv(1 << 17)
            except TimeoutError:
                if self._is_over:
                    return
                continue
            self.hears |= any(mark in packet for mark in MARKS)

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        self._wire.close()


def _followed(text: str, value: float = 0.0) -> Follower:
    model = torch.nn.Linear(40, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return follow(model, torch.optim.SGD(model.parameters(), lr=0.1), text, timeout_s=TIMEOUT_S)


def _follow(text: str) -> None:
    """Send a drift of marks, or a model of them."""
    follower = _followed(text)
    follower.vector.write_(torch.full_like(follower.vector.read(), -MARK))
    for _ in range(2):
        follower.step()
    follower.settle()
    follower.close()


def _first_weights() -> None:
    _followed("local:every=9", MARK if dist.get_rank() == 0 else 0.0).close()


def _average() -> None:
    follower = _followed("local:every=9")
    follower.vector.write_(torch.full_like(follower.vector.read(), MARK))
    follower.average_()
    follower.close()


def _gather_states() -> None:
    follower = _followed("local:every=9", MARK)
    follower.scatter_state(follower.gather_state())
    follower.close()


def _exchange(text: str) -> None:
    group = Group(own_group(world(), CPU, TIMEOUT_S), CPU)
    flat = torch.full((40_000,), MARK)
    Session(made(text), group).exchange_(Bucket(0, Layout.of(["w"], [40_000]), flat, is_last=True))
    group.close()


def _follow_a_server() -> None:
    text = "scheme:exchange=server,trigger=rounds(every=1)"
    if dist.get_rank() == 0:
        serve(text, servers=[0], timeout_s=TIMEOUT_S)
        return
    model = torch.nn.Linear(40, 30)
    follower = follow(model, torch.optim.SGD(model.parameters(), lr=0.1), text, servers=[0], timeout_s=TIMEOUT_S)
    follower.vector.write_(follower.vector.read() * 0)
    follower.average_()
    follower.vector.write_(torch.full_like(follower.vector.read(), -MARK))
    follower.step()
    follower.close()


def _torch_hook() -> None:
    model = DistributedDataParallel(torch.nn.Linear(40, 30))
    session = attach(model, "torch-fp16")
    model(torch.full((1, 40), MARK)).sum().backward()
    session.close()


TRAVELS: dict[str, Callable[[], None]] = {
    "first weights, where ranks differ": _first_weights,
    "gradients, `dense`": partial(_exchange, "dense"),
    "gradients, `bf16`": partial(_exchange, "bf16"),
    "gradients, frames of `topk`": partial(_exchange, "topk:rho=0.5,quantize=none"),
    "gradients, frames to owners": partial(_exchange, "topk:rho=0.5,quantize=none,exchange=server"),
    "gradients, PyTorch's own hooks": _torch_hook,
    "drifts, `local`": partial(_follow, "local:every=1"),
    "drifts, `diloco`": partial(_follow, "diloco:every=1"),
    "drifts in pairs, `noloco`": partial(_follow, "noloco:every=1"),
    "drifts to a dedicated server": _follow_a_server,
    "models, `gossip`": partial(_follow, "gossip-every:quantize=none"),
    "models, `gossip` in step": partial(_follow, "gossip-every:quantize=none,mode=matched"),
    "models, `average_()`": _average,
    "states, `gather_state()` and `scatter_state()`": _gather_states,
}


def _send(what: str, variables: Mapping[str, str]) -> str:
    with _given(variables):
        try:
            TRAVELS[what]()
        except LaunchError as error:
            return str(error)
    return ""


def test_a_listener_hears_nothing_where_a_certificate_is_given(
    certificates: list[tuple[str, str]], two_workers: WorkerPool
) -> None:
    """It writes the table of docs/threats.md."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM).close()
    except (PermissionError, AttributeError):
        pytest.skip("only a privileged process may listen to the loopback")
    with_tls = dict(zip(("LACONIC_TLS_CERT", "LACONIC_TLS_KEY"), certificates[0], strict=True))
    rows = []
    for what in TRAVELS:
        cells = []
        for variables in ({}, with_tls):
            with _Listener() as listener:
                errors = two_workers.run(_send, what, variables, timeout_s=60)
            assert errors == [""] * 2 or (variables and all("send in clear" in error for error in errors)), errors
            cells.append("**in clear**" if listener.hears else "refused" if any(errors) else "encrypted")
        rows.append(f"| {what} | {' | '.join(cells)} |")
    page = (Path(__file__).parents[2] / "docs" / "threats.md").read_text()
    unproven = [row for row in rows if not row.endswith(("**in clear** | encrypted |", "**in clear** | refused |"))]
    assert not unproven, unproven  # what is not heard without a certificate either proves nothing
    assert "\n".join(rows) in page, "\n".join(rows)
