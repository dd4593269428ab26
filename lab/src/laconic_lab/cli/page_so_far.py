"""The page of a comparison while it goes on, and in a browser."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic_lab.compare import compare_so_far
from laconic_lab.errors import TaskError
from laconic_lab.measures import MEASURES
from laconic_lab.report import write_report_so_far

_SHARE = 0.02  # of the time that drawing may take: the runs, which are timed, use the same cores


@dataclass
class PageSoFar:
    """Writes a comparison's page from the runs that there are; `told` is the one under way."""

    out: Path
    setting: Mapping[str, Any]  # what heads a comparison's records
    schemes: Sequence[str]
    rounds: int
    link_bits_per_s: int | None
    told: str = ""
    _due: float = 0.0

    def update(self) -> None:
        """After an evaluation, unless drawing would take more of the time than its share."""
        begun = time.monotonic()
        if begun >= self._due:
            self.write()
            now = time.monotonic()
            self._due = now + (now - begun) / _SHARE

    def break_off(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave a page that stays as it is, where an error ends the runs."""
        if kind is not None:
            self.write(is_running=False)

    def write(self, *, is_running: bool = True) -> Path | None:
        """Write it; None where that cannot be done, which ends no run."""
        measure = MEASURES[self.setting["measure"]]
        state = "Running" if is_running else "Broken off"
        told = f"{state}: {self.told}." if self.told else f"{state}."
        try:
            found = compare_so_far(
                self.out, self.schemes, self.rounds, measure, self.setting["target"], self.link_bits_per_s
            )
            return write_report_so_far(self.out, self.setting, found, told, is_running=is_running)
        except TaskError:
            return None


def open_in_browser(page: Path | None) -> None:
    """Open a page, or say where it is."""
    if page is None:
        return
    # Without a display webbrowser finds those that take over the terminal.
    has_display = sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if not (has_display or os.environ.get("BROWSER")) or not webbrowser.open(page.resolve().as_uri()):
        print(f"laconic: no browser can be opened here; the page is {page}", file=sys.stderr, flush=True)
