"""A gradient that the user throws away has no effect later, under every scheme that keeps something."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic import LaconicError, Scheme, Session, StateError, parse
from laconic.testing import InProcess
from tests.parts import ALL_TEXTS
from tests.virtual import gradients, in_process, one_step

WORKERS = 4
WITH_MEMORY = [text for text in ALL_TEXTS if isinstance(s := parse(text), Scheme) and s.memory.kinds]


def _run(transport: InProcess, text: str, unused_before: set[int]) -> list[Tensor]:
    scheme = parse(text)
    assert isinstance(scheme, Scheme)
    session = Session(scheme, transport, discards=True)
    results: list[Tensor] = []
    for step in range(4):
        if step in unused_before:
            one_step(session, gradients(transport.rank, 100 + step))
            session.discard_if_(True)
        results += one_step(session, gradients(transport.rank, step)).values()
    kept = session.state_dict()
    results += [tensor for kind in kept["memory"].values() for tensor in kind.values()]
    return [*results, torch.tensor([kept["step"], kept["skipped_steps"]])]


@pytest.mark.parametrize("text", WITH_MEMORY)
def test_a_discarded_step_leaves_no_trace(text: str) -> None:
    without = in_process(WORKERS, lambda transport: _run(transport, text, set()))
    anywhere = in_process(WORKERS, lambda transport: _run(transport, text, {0, 2, 3}))
    for plain, discarded in zip(without, anywhere, strict=True):
        assert len(plain) == len(discarded) and all(map(torch.equal, plain, discarded))


def test_what_only_some_ranks_discard_is_an_error_on_all() -> None:
    def work(transport: InProcess) -> str:
        session = Session(parse("topk:rho=0.1"), transport, discards=True)  # type: ignore[arg-type]
        one_step(session, gradients(transport.rank, 0))
        with pytest.raises(LaconicError, match=r"rank 1 did not use its gradients, and others did") as error:
            session.discard_if_(transport.rank == 1)
        return str(error.value)

    assert len(set(in_process(2, work))) == 1


def test_a_step_is_discarded_once_and_where_it_was_asked_for_beforehand() -> None:
    def work(transport: InProcess) -> None:
        session = Session(parse("topk:rho=0.1"), transport, discards=True)  # type: ignore[arg-type]
        with pytest.raises(StateError, match="no step to discard"):
            session.discard_if_(True)
        one_step(session, gradients(transport.rank, 0))
        session.discard_if_(True)
        with pytest.raises(StateError, match="no step to discard"):
            session.discard_if_(True)

    in_process(2, work)
