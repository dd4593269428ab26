"""What a GPU does in two recordings, here on a CPU as it is: the bits of the usual way, whatever comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import FrameError, Session
from laconic.paths.all_gather import Gathering
from laconic.paths.path import Work
from laconic.paths.push_pull import PushPull
from laconic.transport import InProcess, in_process
from tests.parts import made
from tests.virtual import gradients, one_core, one_step, pipelined_step

TEXTS = [
    "topk:rho=0.05",
    "topk:rho=0.05,quantize=none",
    "topk:rho=0.1,per=parameter,quantize=fp16",
    "topk:rho=0.05,exchange=server",
    "overlap:rho=0.05",
]


def _as_on_gpu(path: Gathering | PushPull, work: Work) -> bool:
    plan = path.plans.of(work)
    can_be = plan.is_recordable if isinstance(path, Gathering) else bool(plan.plan.windows)
    return path.replays and can_be and work.flat.dtype == torch.float32


@contextmanager
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for path in (Gathering, PushPull):
            patch.setattr(path, "looks_itself", _as_on_gpu)
        yield


def _steps(text: str, *, pipelined: bool = False, undoes: bool = False) -> list[tuple[list[dict[str, Tensor]], Any]]:
    """Five steps of three workers, of whom the second sees NaN once; what came out, and what is kept."""

    def work(transport: InProcess) -> tuple[list[dict[str, Tensor]], Any]:
        session = Session(made(text), transport, loss_scale=(lambda: 8.0) if undoes else None)
        outs = []
        for step in range(5):
            given = gradients(transport.rank, step)
            if (transport.rank, step) == (1, 2):
                given["c"][3] = torch.nan
            outs.append((pipelined_step if pipelined else one_step)(session, given))
        return outs, session.state_dict()["memory"]["residual"]

    with one_core():
        return in_process(3, work)


@pytest.mark.parametrize("undoes", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_recordings_give_the_bits_of_the_usual_way(text: str, undoes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step in which one worker sees NaN all see it, and nobody keeps it; stations change nothing."""
    expected = _steps(text, undoes=undoes)
    with _recorded(monkeypatch):
        for pipelined in (False, True):
            for (outs, kept), (usual, usually) in zip(
                _steps(text, pipelined=pipelined, undoes=undoes), expected, strict=True
            ):
                for out, want in zip(outs, usual, strict=True):
                    assert all(torch.equal(out[name].nan_to_num(7), want[name].nan_to_num(7)) for name in want)
                assert all(torch.equal(kept[name], usually[name]) for name in usually)


def test_a_damaged_frame_is_named_though_it_was_read_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(transport: InProcess) -> str:
        whole = transport.all_gather

        def damaged(frame: Tensor, kind: str) -> Tensor:
            frames = whole(frame, kind).clone()
            frames[1, -9] ^= 4
            return frames

        monkeypatch.setattr(transport, "all_gather", damaged)
        with pytest.raises(FrameError) as caught:
            one_step(Session(made(TEXTS[0]), transport), gradients(transport.rank, 0))
        return str(caught.value)

    with _recorded(monkeypatch), one_core():
        for said in in_process(2, work):
            assert "from rank 1: its check sum does not match" in said


def test_what_is_kept_otherwise_is_not_recorded() -> None:
    def work(transport: InProcess) -> bool:
        session = Session(made("scheme:select=topk(rho=0.05),memory=momentum,exchange=all-gather"), transport)
        assert isinstance(session._path, Gathering)
        return session._path.replays

    assert in_process(1, work) == [False]
