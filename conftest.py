from __future__ import annotations

from collections.abc import Iterator

import pytest

from laconic import layout
from tests.workers import WorkerPool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several processes that run tests, one runs those of a file, or of a group: its fixtures are made once."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


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


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest model is exchanged in halves."""
    monkeypatch.setattr(layout, "WORTH_HALVING", 2)
