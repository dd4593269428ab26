"""CONTRIBUTING.md shows the house as it is, and its steps lead to a selector and a recipe that are green."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_house import FLOOR_OF

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_picture_shows_every_room() -> None:
    rows = [line.split("  ")[0].split() for line in re.findall(r"^    (\S.*)", PAGE.partition("## One step")[0], re.M)]
    shown = [[room for room in row if room in FLOOR_OF] for row in rows]
    assert {room for row in shown for room in row} == set(FLOOR_OF)
    floors = [min(FLOOR_OF[room] for room in row) for row in shown]
    assert floors == sorted(floors, reverse=True), "a room stands above one that it is imported by"


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) < 900


def test_what_the_page_says_is_green(tmp_path: Path) -> None:
    for folder in ("src", "tests", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("conftest.py", "pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, tmp_path)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        _apply(block, tmp_path)
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    # An editable install finds its own tree before PYTHONPATH.
    forget = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]"
    (tmp_path / "sitecustomize.py").write_text(forget)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{tmp_path}"}
    for command in commands.splitlines():
        arguments = [sys.executable, *shlex.split(command)[1:]]
        ran = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed and int(passed[1]) >= 10, ran.stdout[-3000:]  # the laws, its golden trajectory, its examples
    assert (tmp_path / "tests/golden.json").read_text() != (ROOT / "tests/golden.json").read_text()


def _apply(block: str, root: Path) -> None:
    """Write a block where its first line says: a new file, below the line that begins so, or at the end."""
    title, _, code = block.partition("\n")
    placed = re.fullmatch(r'# (new file )?(\S+?)(?:, (?:below "(.*)"|at the end))?', title)
    assert placed, title
    file = root / placed[2]
    if placed[1]:
        file.write_text(code)
    elif placed[3] is None:
        file.write_text(file.read_text() + code)
    else:
        lines = file.read_text().splitlines(keepends=True)
        at = next(number for number, line in enumerate(lines) if line.startswith(placed[3]))
        file.write_text("".join([*lines[: at + 1], code, *lines[at + 1 :]]))
