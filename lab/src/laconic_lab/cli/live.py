"""Runs while they go: their records read as they are written, for a view on a terminal and a comparison's page."""

from __future__ import annotations

import json
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic_lab.compare import compare_so_far
from laconic_lab.errors import TaskError
from laconic_lab.figures import Measure
from laconic_lab.records import RECORDS
from laconic_lab.report import write_report_so_far
from laconic_lab.report.markup import si_bytes
from laconic_lab.train.result import WATCHED

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LOOK_S = 0.5  # a look takes some milliseconds of a core that a run could use
_RECENT = 10  # steps over which a rate is taken
_LAST_LINES_S = 5


@dataclass(frozen=True)
class Runs:
    """The runs that are looked at: the folders of each scheme's runs."""

    folders: Mapping[str, Sequence[Path]]
    num_steps: int  # of one run
    measure: Measure
    link_bits_per_s: int | None = None  # of the worker that writes the records, where it is known


def can_show() -> bool:
    """Return whether there is a terminal to show runs on."""
    return sys.stderr.isatty() and os.isatty(2) and os.environ.get("TERM") not in ("dumb", "unknown")


@contextmanager
def watched(runs: Runs) -> Iterator[bool]:
    """Show the runs of the block on a terminal, if there is one, and leave that to this process; whether they are."""
    if not can_show():
        yield False
        return
    tails = {scheme: [Tail(folder) for folder in folders] for scheme, folders in runs.folders.items()}
    with _screen() as show:

        def look() -> None:
            for tail in (tail for of in tails.values() for tail in of):
                tail.read()
            show(lambda width: frame(runs, tails, width))

        with _again_and_again(look):
            yield True


@contextmanager
def _again_and_again(look: Callable[[], None]) -> Iterator[None]:
    """Look now and then, in a thread of its own, and a last time at the end."""
    is_over = threading.Event()

    def keep_looking() -> None:
        while not is_over.wait(_LOOK_S):
            look()
        look()

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Tail:
    """The facts of one run, read as they are written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORDS
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take in what is new."""
        try:
            self._read()
        except FileNotFoundError:
            return
        except (json.JSONDecodeError, UnicodeDecodeError):
            self._forget()  # a resumed run has cut its records, and written over the place where this was

    def _read(self) -> None:
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._forget()
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):  # else half of it is still to come
                    fact = json.loads(line)
                    self._offset += len(line)
                    {"step": self.steps, "eval": self.evaluations}.get(fact["kind"], []).append(fact)


def frame(runs: Runs, tails: Mapping[str, Sequence[Tail]], width: int) -> RenderableType:
    """A bar for each scheme with what it is judged by, its bytes and its link, and the loss of the run under way."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, max_width=max(12, width // 3))
    table.add_column(min_width=6, ratio=1)
    for _ in range(4):
        table.add_column(justify="right", no_wrap=True)
    last: tuple[str, Tail] | None = None
    for scheme, of in tails.items():
        done = sum(len(tail.steps) for tail in of)
        total = runs.num_steps * len(of)
        begun = [tail for tail in of if tail.steps]
        bar = ProgressBar(total=total, completed=done, width=min(30, width // 5))
        facts = ["", "", ""]
        if begun:
            last = scheme, begun[-1]
            judged = begun[-1].evaluations[-1][runs.measure.name] if begun[-1].evaluations else None
            sent = sum(fact["bytes_out"] for fact in begun[-1].steps) / len(begun[-1].steps)
            facts = [runs.measure.text(judged), f"{_si(sent)}/step", _link(begun[-1].steps, runs.link_bits_per_s)]
        table.add_row(Text(scheme), bar, f"{done}/{total}", *facts)
    if last is None:
        return table
    scheme, tail = last
    loss = tail.steps[-1]["loss"]
    return Group(table, Text(f"train loss of {scheme}: {'-' if loss is None else f'{loss:.3f}'}"))


def _link(steps: Sequence[Mapping[str, Any]], bits_per_s: int | None) -> str:
    """The share of the link that the last steps used, by its own count where there is one, or else bytes a second."""
    recent = steps[-_RECENT:]
    seconds = sum(fact["ms"] for fact in recent) / 1e3
    per_s = sum(fact.get("link_bytes_out", fact["bytes_out"]) for fact in recent) / seconds if seconds else 0.0
    return f"link {8 * per_s / bits_per_s:.0%}" if bits_per_s else f"{_si(per_s)}/s"


def _si(num_bytes: float) -> str:
    return si_bytes(float(f"{num_bytes:.3g}"))


@contextmanager
def _screen() -> Iterator[Callable[[Callable[[int], RenderableType]], None]]:
    """The terminal for one view; what this process and its children print meanwhile is caught, and shown above it."""
    from rich.console import Console
    from rich.live import Live

    sys.stdout.flush()
    sys.stderr.flush()
    terminals = {number: os.dup(number) for number in (1, 2) if os.isatty(number)}
    reading, writing = os.pipe()
    with os.fdopen(os.dup(terminals[2]), "w", encoding="utf-8") as file:
        width = os.get_terminal_size(terminals[2]).columns or 80
        console = Console(file=file, force_terminal=True, width=width)
        live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        above = threading.Thread(target=_print_above, args=(console, reading), daemon=True)
        before = os.environ.get(WATCHED)
        os.environ[WATCHED] = "1"
        for number in terminals:
            os.dup2(writing, number)
        os.close(writing)
        live.start()
        above.start()
        try:
            yield lambda make: live.update(make(width), refresh=True)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, terminal in terminals.items():
                os.dup2(terminal, number)
                os.close(terminal)
            above.join(_LAST_LINES_S)  # a process that was left behind may hold the other end
            live.stop()
            if before is None:
                del os.environ[WATCHED]


def _print_above(console: Console, reading: int) -> None:
    from rich.text import Text

    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            console.print(Text.from_ansi(line.rstrip("\n")), soft_wrap=True)


@dataclass(frozen=True)
class PageSoFar:
    """Writes a comparison's page from the runs that have ended."""

    out: Path
    setting: Mapping[str, Any]  # what heads a comparison's records
    schemes: Sequence[str]
    link_bits_per_s: int | None

    def write(self, state: str, *, is_running: bool = True) -> Path | None:
        """Write it, with where the comparison stands; None where that cannot be done, which ends no run."""
        try:
            comparison = compare_so_far(self.out, self.schemes, self.setting, self.link_bits_per_s)
            return write_report_so_far(self.out, self.setting, comparison, state, is_running=is_running)
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
