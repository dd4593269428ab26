"""What all ranks must prove, and what of theirs travels how: a listener on the wire sees every byte."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from laconic import LaunchError, follow, serve
from laconic.transport import Group, own_group, world
from tests.gossiping import Small
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
    cases += [("secret", 0, True), ("certificate", 0, True)]
    return [(kind, *_failure(kind, certificates, other, served=served)) for kind, other, served in cases]


def test_a_failed_proof_is_an_error_on_all_ranks_at_once(
    certificates: list[tuple[str, str]], fresh_workers: WorkerPool
) -> None:
    for failures in fresh_workers.run(_failures, certificates, timeout_s=120):
        for kind, error, seconds in failures:
            cause = "LACONIC_SECRET" if "secret" in kind else "LACONIC_TLS_CERT"
            assert cause in error and "\n" not in error and seconds < TIMEOUT_S / 2, (kind, error, seconds)
