"""Figures that the documentation may link to: records under results/, and the page made from them.

    laconic bench wire --json | python -m laconic.measure.results add wire --what "..." --command "laconic bench wire"
    python -m laconic.measure.results page          # docs/results.md, and the figures in README.md and docs/

A record is {"command", "commit", "machine", "date", "seed", "what", "rows"}; each row is one object. A figure in a text
stands between <!-- RECORD; ROW; COLUMN --> and <!-- -->, where ROW is the row's first cell, or COLUMN=VALUE, or several
of them, or A over B: how many times A's figure is B's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.errors import TaskError

RESULTS = Path("results")
PAGE = Path("docs/results.md")
_FIGURE = re.compile(r"<!-- ([^;>]+); ([^>]+); ([^;>]+) -->.*?<!-- -->", re.S)
_HEAD = """# Results

Made from the records under `results/` by `python -m laconic.measure.results page`; edit those, not this.
"""
_KEYS = ("command", "commit", "machine", "date", "what", "rows")


def write_result(
    folder: Path, name: str, *, what: str, command: str, rows: Sequence[Mapping[str, Any]], seed: int | None = None
) -> Path:
    """Write folder/NAME.json: the rows, and what it takes to measure them again."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise TaskError(f"a result cannot be called {name!r}; give letters, digits, - and _")
    record = {
        "command": command,
        "commit": _commit(),
        "machine": _machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        "what": what,
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def results_page(folder: Path) -> str:
    """The page of all records in a folder; the same records give the same text."""
    return _HEAD + "".join(_section(path) for path in sorted(folder.glob("*.json")))


def with_figures(text: str, folder: Path) -> str:
    """The text with every figure that it marks as the records in a folder have it today."""

    def figure(found: re.Match[str]) -> str:
        name, row, column = (part.strip() for part in found.groups())
        record = _read(folder / f"{name}.json")
        values = [_value(record["rows"], one, column, name) for one in row.split(" over ")]
        shown = _cell(values[0]) if len(values) == 1 else _times(float(values[0]) / float(values[1]))
        return f"<!-- {name}; {row}; {column} -->{shown}<!-- -->"

    return _FIGURE.sub(figure, text)


def _value(rows: Sequence[Mapping[str, Any]], row: str, column: str, name: str) -> Any:
    wanted = [part.strip() for part in row.split(";")]
    meant = [
        one
        for one in rows
        if column in one
        and {str(value) for value in list(one.values())[:1]} | {f"{key}={value}" for key, value in one.items()}
        >= set(wanted)
    ]
    if len(meant) != 1:
        raise TaskError(f"{len(meant)} rows of {name} are {row!r} and have {column!r}; name one, by its first cell")
    return meant[0][column]


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise TaskError(f"there is no record {path}; `results add` writes one")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    lacking = [key for key in _KEYS if key not in record]
    if lacking:
        raise TaskError(f"{path} lacks {lacking[0]!r}; a result has {', '.join(_KEYS)}")
    return record


def _section(path: Path) -> str:
    record = _read(path)
    columns = list(dict.fromkeys(name for row in record["rows"] for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in record["rows"]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    seed = "" if record.get("seed") is None else f", seed {record['seed']}"
    made = f"`{record['command']}`, commit {record['commit']}, {record['machine']}, {record['date']}{seed}."
    return f"\n## {path.stem}\n\n{record['what']}\n\n{table}\n\n{made}\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value).replace("|", "\\|")


def _commit() -> str:
    """The commit that ran, with a + where the tree had changes of its own."""
    ran = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout.strip() or "unknown"


def _machine() -> str:
    system = f"{platform.system()} on {platform.machine()}"
    return f"{os.cpu_count()} cores of {_processor()}, {system}, Python {platform.python_version()}"


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", table.read_text(), re.M) if table.exists() else None
    return found[1] if found else platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Add a record, or make the page."""
    parser = argparse.ArgumentParser(prog="python -m laconic.measure.results", description="Records and their page.")
    deeds = parser.add_subparsers(dest="deed", required=True)
    add = deeds.add_parser("add", help="write results/NAME.json from rows on stdin, one JSON object a line")
    add.add_argument("name")
    add.add_argument("--what", required=True, help="one sentence: what was measured")
    add.add_argument("--command", required=True, help="what printed the rows")
    add.add_argument("--seed", type=int)
    deeds.add_parser("page", help=f"write {PAGE}, and the figures that README.md and docs/ mark, from all records")
    asked = parser.parse_args(arguments)
    if asked.deed == "add":
        rows = [json.loads(line) for line in sys.stdin if line.strip()]
        print(write_result(RESULTS, asked.name, what=asked.what, command=asked.command, rows=rows, seed=asked.seed))
    else:
        PAGE.write_text(results_page(RESULTS), encoding="utf-8")
        for page in (Path("README.md"), *sorted(PAGE.parent.glob("*.md"))):
            page.write_text(with_figures(page.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
