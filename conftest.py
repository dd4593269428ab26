from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest

from laconic import layout
from tests.workers import WorkerPool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several processes that run tests, one runs those of a file, or of a group: its fixtures are made once.

    The lab's come first: they wait more than they compute, so others fill their pauses, and none is left for the end.
    """
    items.sort(key=lambda item: "lab" not in item.path.parts)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(scope="session", autouse=True)
def _early_forkserver() -> None:
    """Start what forks workers before any test sets a variable of the environment, which it would keep."""
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def four_workers() -> Iterator[WorkerPool]:
    pool = WorkerPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_workers() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def fresh_workers() -> Iterator[WorkerPool]:
    """Processes of their own: what is tried here leaves groups and threads behind that others need not meet."""
    pool = WorkerPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fashion-MNIST's files with 200 images to train on and 100 to test with: a test of the slice takes a second."""
    folder = tmp_path_factory.mktemp("few-images")
    labels = np.arange(200, dtype=np.uint8) % 10
    images = np.zeros((200, 28, 28), dtype=np.uint8)
    images[np.arange(200), 2 * labels] = 255  # a line, whose height tells the class
    for split, count in (("train", 200), ("t10k", 100)):
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, array.ndim)) + np.array((count, *array.shape[1:]), dtype=">u4").tobytes()
            (folder / f"{split}-{name}-ubyte").write_bytes(head + array[:count].tobytes())
    return folder


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest model is exchanged in halves."""
    monkeypatch.setattr(layout, "WORTH_HALVING", 2)
