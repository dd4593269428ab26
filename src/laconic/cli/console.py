"""What commands share: lines on stderr, tables and JSON on stdout, and one line for a rank that fails."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from laconic.errors import LaconicError

_REPEATED_S = 2.0  # in which rank 0 can write a line


def say(text: str) -> None:
    """Write a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number in a format, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Columns wide enough for their cells: the first ones to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def to_json(value: Any) -> str:
    """JSON, which has no NaN and no infinity: those become null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def is_worker() -> bool:
    """Whether a launcher like torchrun started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def as_worker(work: Callable[[], int], *, failed: int = 1) -> int:
    """Do a rank's work; what goes wrong is one line of its own, and the launcher says which rank was first.

    What all ranks raise alike is rank 0's to say; the others end after it, since the first to end has all stopped.
    """
    try:
        return work()
    except Exception as error:
        if getattr(error, "is_repeated", False):
            time.sleep(_REPEATED_S)
            return failed
        first_line = next(iter(str(error).splitlines()), "")
        cause = error if isinstance(error, LaconicError) else f"{type(error).__name__}: {first_line}"
        say(f"laconic: rank {os.environ['RANK']}: {cause}")
        if os.environ.get("LACONIC_TRACEBACK"):
            raise
        return failed
