"""Four stages: the numbers of one bucket after the other, messages in an order that all share, errors that land."""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import Session, parse
from laconic.layout import Bucket, Layout
from laconic.paths import Messages, Path, PhaseClock, Work
from laconic.session import Background
from laconic.session.mismatch import Replicas
from laconic.session.pipeline import Flight, Pipeline
from laconic.transport import InProcess, Transport, in_process, silent_end
from tests import golden
from tests.virtual import LAYOUTS, buckets_of, gradients, pipelined_step

WRITTEN = json.loads(golden.FILE.read_text())
CPU = torch.device("cpu")


@pytest.mark.parametrize("text", [text for text in golden.TEXTS if "overflow" in golden.courses_of(text)])
def test_the_numbers_are_those_of_one_bucket_after_the_other(text: str) -> None:
    """Of the course in which a worker is not finite, too."""
    found = golden.trajectory(text, "overflow", pipelined_step, kernels="")
    written = WRITTEN[text]["overflow"]
    if "digest" in written:
        assert found == written
    else:
        assert found["sample"] == pytest.approx(written["sample"], rel=1e-6, abs=golden.tolerance(text))


@dataclass
class _Rounds(Path):
    """Says as many messages about a bucket as that has parameters, and nothing else."""

    said: list[tuple[str, int]]
    offsets: Sequence[int] = (0, 1, 2)

    checks_finite = False

    @property
    def message_offsets(self) -> Sequence[int]:
        return self.offsets

    def exchange(self, work: Work) -> Messages:
        for number in range(len(work.layout.spans)):
            yield partial(self._note, work.layout.names[0], number)
        return ()

    def _note(self, bucket: str, number: int) -> int:
        self.said.append((bucket, number))
        return number


def _step(work: Callable[[Pipeline, list[BaseException | None]], None], session: Session) -> list[BaseException | None]:
    """What the buckets of a step landed with."""
    landed: list[BaseException | None] = []
    pipeline = Pipeline(session, nullcontext)
    work(pipeline, landed)
    pipeline.close()
    return landed


def _session_of_rounds(said: list[tuple[str, int]], offsets: Sequence[int] = (0, 1, 2)) -> Session:
    transport = silent_end(1)

    def rounds(_: object, transport: Transport, clock: PhaseClock, *__: object, **___: object) -> _Rounds:
        return _Rounds(transport, clock, said, offsets)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("path_for", "dense_path"):
            patch.setattr(f"laconic.session.session.{name}", rounds)
        return Session(parse("dense"), transport)  # type: ignore[arg-type]


@pytest.mark.parametrize("offsets", [(0, 1, 2), (0, 2, 3), (0, 1, 4)])
def test_message_r_of_bucket_b_leaves_in_the_order_of_b_plus_its_offset(offsets: Sequence[int]) -> None:
    said: list[tuple[str, int]] = []
    layouts = [Layout.of([f"{name}{number}" for number in range(3)], [1] * 3) for name in "abcd"]

    def work(pipeline: Pipeline, landed: list[BaseException | None]) -> None:
        for number, layout in enumerate(layouts):
            bucket = Bucket(number, layout, torch.zeros(3), is_last=number == 3)
            pipeline.begin(Flight(bucket, landed.append))

    assert _step(work, _session_of_rounds(said, offsets)) == [None] * 4
    expected = sorted((b + offsets[r], b, r) for b in range(4) for r in range(3))
    assert said == [(f"{'abcd'[b]}0", r) for _, b, r in expected]


def test_what_comes_is_taken_where_the_next_bucket_takes_long() -> None:
    said: list[tuple[str, int]] = []
    session = _session_of_rounds(said, offsets=(0, 2))
    caught_up = threading.Event()
    session.transport.receive_pending = caught_up.set  # type: ignore[method-assign]
    first, second = (Layout.of([f"{b}", f"{b}'"], [1, 1]) for b in range(2))

    def slowly(pipeline: Pipeline, landed: list[BaseException | None]) -> None:
        pipeline.begin(Flight(Bucket(0, first, torch.zeros(2), is_last=False), landed.append))
        assert caught_up.wait(20)
        pipeline.begin(Flight(Bucket(1, second, torch.zeros(2), is_last=True), landed.append))

    assert _step(slowly, session) == [None, None]
    assert said == [("0", 0), ("1", 0), ("0", 1), ("1", 1)]


class _LostError(Exception):
    pass


class _FailingAt(InProcess):
    """A network whose n-th message fails."""

    def __init__(self, inner: InProcess, number: int) -> None:
        vars(self).update(vars(inner))
        self._left = number

    def all_gather(self, frame: Tensor, kind: str) -> Tensor:
        self._left -= 1
        if self._left < 0:
            raise _LostError
        return super().all_gather(frame, kind)


@pytest.mark.parametrize("number", range(3))
def test_after_a_failure_everything_lands_with_it_and_nothing_more_is_said(number: int) -> None:
    def work(transport: InProcess) -> tuple[list[str], int]:
        session = Session(parse("topk:rho=0.05"), _FailingAt(transport, number))  # type: ignore[arg-type]
        background = Background(session, CPU)
        said = []
        for step in range(2):
            futures = [background.submit(bucket) for bucket in buckets_of(gradients(transport.rank, step))]
            for future in futures:
                try:
                    future.wait()
                    said.append("")
                except RuntimeError as error:  # as torch passes on what a callback raised
                    said.append("lost" if "_LostError" in str(error) else str(error))
        background.close()
        assert isinstance(background.error, _LostError)
        return said, transport.traffic.by_kind["sparse"].messages if number else 0

    for said, num_messages in in_process(2, work):
        assert set(said[:number]) <= {"", "lost"}  # the error may overtake what was heard
        assert said[number:] == ["lost"] * (2 * len(LAYOUTS) - number)
        assert num_messages == number


def test_a_bucket_that_cannot_begin_ends_those_in_flight() -> None:
    said: list[tuple[str, int]] = []

    def work(pipeline: Pipeline, landed: list[BaseException | None]) -> None:
        layout = Layout.of(["a", "b"], [1, 1])
        no_tensor: Any = None
        pipeline.begin(Flight(Bucket(0, layout, torch.zeros(2), is_last=False), landed.append))
        pipeline.begin(Flight(Bucket(1, layout, no_tensor, is_last=True), landed.append))

    landed = _step(work, _session_of_rounds(said))
    assert len(landed) == 2 and isinstance(landed[1], AttributeError)


@pytest.mark.parametrize("text", ["overlap:rho=0.05", "topk:rho=0.05,exchange=server", "sign", "multiscale", "dense"])
def test_replicas_are_compared_though_messages_wait_for_their_turns(text: str) -> None:
    """Before the last bucket of every second step, with all others landed; numbers as without."""

    def work(transport: InProcess, every: int) -> list[Tensor]:
        session = Session(parse(text), transport)  # type: ignore[arg-type]
        replicas = Replicas({"w": torch.ones(8)}, transport, every=every, on_mismatch="warn") if every else None
        background = Background(session, CPU, replicas=replicas)
        landed = []
        for step in range(4):
            futures = [background.submit(bucket) for bucket in buckets_of(gradients(transport.rank, step))]
            landed += [future.wait().clone() for future in futures]
        background.close()
        return landed

    compared, alone = (in_process(2, partial(work, every=every)) for every in (2, 0))
    for one, other in zip(compared, alone, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_step_that_is_closed_in_its_midst_lands_and_says_so() -> None:
    """The second bucket waits for a turn that does not come; the first has had its turn."""

    def work(transport: InProcess) -> str:
        session = Session(parse("overlap:rho=0.05"), transport)  # type: ignore[arg-type]
        background = Background(session, CPU)
        futures = [background.submit(bucket) for bucket in buckets_of(gradients(transport.rank, 0))[:2]]
        background.close()
        assert all(future.done() for future in futures)
        with pytest.raises(RuntimeError) as error:
            futures[1].wait()
        return str(error.value)

    for said in in_process(2, work):
        assert "closed in the midst of a step" in said


def test_a_session_that_is_closed_leaves_nothing_to_do_at_exit() -> None:
    """An entry for each would hold memory that nobody owns until the process ends."""

    def work(transport: InProcess) -> int:
        num_callbacks = 0
        for number in range(20):
            Background(Session(parse("topk:rho=0.05"), transport), CPU).close()  # type: ignore[arg-type]
            num_callbacks = num_callbacks if number else atexit._ncallbacks()
        return int(atexit._ncallbacks()) - num_callbacks

    assert in_process(1, work) == [0]
