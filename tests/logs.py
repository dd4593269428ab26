"""What the library logs in this process."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged(match: str | None = None) -> Iterator[list[str]]:
    """Every line that is logged inside; one of them must match, where something is given to match."""
    handler = _Lines()
    logger = logging.getLogger("laconic")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
    assert match is None or any(re.search(match, line) for line in handler.lines), handler.lines
