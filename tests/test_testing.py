"""laconic.testing: every fault point is passed somewhere, and a handler acts on what a worker is doing."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import laconic
from laconic import fault_points, testing
from laconic.layout import Bucket, Layout
from laconic.session import Session
from laconic.testing import InProcess, WorkerDiedError, at_fault_point, in_process

SOURCE = Path(laconic.__file__).parent
BUCKET_POINTS = ["bucket.begin", "bucket.encoded", "bucket.send", "bucket.apply", "bucket.applied"]


def _one_step(transport: InProcess) -> torch.Tensor:
    bucket = Bucket(0, Layout.of(["w"], [(8,)]), torch.full((8,), float(transport.rank)), is_last=True)
    Session(laconic.recipes.dense(), transport).exchange_(bucket)
    return bucket.flat


def test_every_fault_point_of_the_library_is_passed_in_one_place() -> None:
    called = re.compile(r'fault_point\("([\w.]+)"')
    passed = [name for path in SOURCE.rglob("*.py") for name in called.findall(path.read_text())]
    passed.remove("bucket.send")  # the example of a docstring
    assert sorted(passed) == sorted(name for name in testing.FAULT_POINTS if not name.startswith("train."))


def test_a_bucket_passes_its_points_in_order_and_handlers_end_with_their_block() -> None:
    passed: list[str] = []
    with ExitStack() as stack:
        for name in BUCKET_POINTS:
            stack.enter_context(at_fault_point(name, lambda bucket, name=name: passed.append(name)))
        in_process(1, _one_step)
    assert list(dict.fromkeys(passed)) == BUCKET_POINTS and not fault_points.armed
    in_process(1, _one_step)
    assert list(dict.fromkeys(passed)) == BUCKET_POINTS


def test_a_handler_that_raises_ends_the_step_and_an_unknown_name_is_refused() -> None:
    def die(bucket: Bucket) -> None:
        raise WorkerDiedError("here")

    with at_fault_point("bucket.apply", die), pytest.raises(WorkerDiedError, match="here"):
        in_process(2, _one_step)
    with pytest.raises(ValueError, match=r"give one of bucket\.begin"), at_fault_point("bucket.begun", die):
        pass


def test_public_names_are_sorted_and_exist() -> None:
    assert testing.__all__ == sorted(testing.__all__) and all(hasattr(testing, name) for name in testing.__all__)
