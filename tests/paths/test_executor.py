"""Captured steps, on a CPU: the bits of launched ones, whatever comes, though a replay calls the body of long ago."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import FrameError, Session
from laconic.kernels.device import CapturedStep, Executor, GraphPool, Step
from laconic.layout import Bucket
from laconic.session import Background
from laconic.transport import InProcess, in_process
from tests.parts import made
from tests.virtual import LAYOUTS, gradients, one_core, one_step

CPU = torch.device("cpu")
STEPS = 9
TEXTS = [
    "topk:rho=0.05",
    "topk:rho=0.05,quantize=none",
    "topk:rho=0.1,per=parameter,quantize=fp16",
    "topk:rho=0.05,exchange=server",
    "overlap:rho=0.05,score=product",
]


class _PoolOnCpu(GraphPool):
    """A replay calls what was captured, with what it knew then, as a CUDA graph would."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        return body


class _Capturing(Executor):
    """Captures on a CPU as on a GPU."""

    def captures(self, tensor: Tensor, wire: torch.device | None) -> bool:
        return tensor.dtype == torch.float32

    def new_pool(self, device: torch.device) -> GraphPool:
        return _PoolOnCpu(device)


def _steps(
    text: str, make: Callable[[], Executor], *, pipelined: bool = False, undoes: bool = False
) -> list[tuple[list[list[Tensor]], Any, int]]:
    """Steps of three workers on gradients that stay where they are; the second sees NaN in the third and the eighth.

    Returns what came out, what is kept, and how many steps were replayed, by rank.
    """

    def work(transport: InProcess) -> tuple[list[list[Tensor]], Any, int]:
        executor = make()
        session = Session(made(text), transport, loss_scale=(lambda: 8.0) if undoes else None, executor=executor)
        background = Background(session, CPU, pipelined=pipelined)
        flats = [torch.empty(layout.num_entries) for layout in LAYOUTS]
        outs = []
        for step in range(STEPS):
            given = gradients(transport.rank, step)
            if transport.rank == 1 and step in (2, 7):
                given["c"][3] = torch.nan
            futures = []
            for index, (flat, layout) in enumerate(zip(flats, LAYOUTS, strict=True)):
                flat.copy_(torch.cat([given[name] for name in layout.names]))
                futures.append(background.submit(Bucket(index, layout, flat, is_last=index == len(LAYOUTS) - 1)))
            outs.append([future.wait().clone().nan_to_num(7) for future in futures])
        background.close()
        return outs, session.state_dict()["memory"]["residual"], executor.num_replayed

    with one_core():
        return in_process(3, work)


@pytest.mark.parametrize("undoes", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_captured_steps_give_the_bits_of_launched_ones(text: str, undoes: bool) -> None:
    """In a step in which one worker sees NaN all see it, and nobody keeps it; stages change nothing."""
    expected = _steps(text, Executor, undoes=undoes)
    for pipelined in (False, True):
        captured = _steps(text, _Capturing, pipelined=pipelined, undoes=undoes)
        for (outs, kept, num_replayed), (launched_outs, launched_kept, none) in zip(captured, expected, strict=True):
            assert num_replayed >= 1 and none == 0
            for out, want in zip(outs, launched_outs, strict=True):
                assert all(map(torch.equal, out, want))
            assert all(torch.equal(kept[name], launched_kept[name]) for name in launched_kept)


class _Damaging(InProcess):
    """A network that damages the frame of rank 1."""

    def __init__(self, inner: InProcess) -> None:
        vars(self).update(vars(inner))

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        frames = super().all_gather(frame, kind).clone()
        frames[1, -9] ^= 4
        return frames


def test_a_damaged_frame_is_named_though_it_was_read_with_the_others() -> None:
    def work(transport: InProcess) -> str:
        session = Session(made(TEXTS[0]), _Damaging(transport), executor=_Capturing())
        with pytest.raises(FrameError) as caught:
            one_step(session, gradients(transport.rank, 0))
        return str(caught.value)

    with one_core():
        for message in in_process(2, work):
            assert "from rank 1: its check sum does not match" in message


def test_a_memory_that_a_zero_gradient_changes_is_not_captured() -> None:
    text = "scheme:select=topk(rho=0.05),memory=momentum,exchange=all-gather"
    assert [num_replayed for *_, num_replayed in _steps(text, _Capturing)] == [0] * 3


class _Sum:
    def __init__(self, total: Tensor) -> None:
        self.total = total


def _add(uses: Tensor, given: Tensor) -> tuple[_Sum, list[Tensor]]:
    total = uses + given
    return _Sum(total), [2 * total]


def test_a_step_is_captured_anew_where_its_tensors_moved_and_launched_where_they_never_stay() -> None:
    captured: CapturedStep[_Sum] = CapturedStep(CPU, _PoolOnCpu(CPU))
    launched: Step[_Sum] = Step(CPU, None)
    replayed = []
    for place in range(6):
        uses = torch.full((3,), float(place))  # somewhere else
        for number in range(5):
            given = torch.arange(3.0) + uses.add_(number)
            for step in (captured, launched):
                result, (output,) = step.run(partial(_add, uses), [uses], given)
                assert torch.equal(result.total, uses + given) and torch.equal(output, 2 * (uses + given))
            replayed.append(captured.is_replayed)
    assert replayed == 4 * [False, False, False, True, True] + 10 * [False]
