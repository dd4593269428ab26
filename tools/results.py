"""Figures that the documentation may link to: records under results/, and the page made from them.

    laconic bench step --json | python tools/results.py add step --what "..." --command "laconic bench step"
    python tools/results.py run votes     # an experiment that results/claims.toml declares, and its record
    python tools/results.py page          # docs/results.md, and the figures in README.md and docs/
    python tools/results.py age           # which sources have changed since each record was made

A record is {"command", "commit", "machine", "date", "seed", "what", "rows"}; each row is one object. It may also have
"duration_s", the seconds that it took, "plot", the column that the site draws, and "sources", digests of the folders
that it measured: where those have changed since, the site says so. A row of several seeds has the mean as COLUMN and
the list of them as "COLUMN by seed". results/claims.toml declares experiments, and what is claimed of their figures.

A figure in a text stands between <!-- RECORD; ROW; COLUMN --> and <!-- -->, where ROW is the row's first cell, or
COLUMN=VALUE, or several of them, or A over B: how many times A's figure is B's, or A minus B.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic_lab.errors import TaskError

RESULTS = Path("results")
PAGE = Path("docs/results.md")
_FIGURE = re.compile(r"<!-- ([^;>]+); ([^>]+); ([^;>]+) -->.*?<!-- -->", re.S)
_HEAD = """# Results

Made from the records under `results/` by `python tools/results.py page`; edit those, not this.
"""
_COLUMNS = ("scheme", "accuracy", "loss", "bytes_out", "bytes_both_ways", "server_bytes_out")
_TIMES = ("seconds", "step_ms")
_KEYS = ("command", "commit", "machine", "date", "what", "rows")


def write_result(
    folder: Path,
    name: str,
    *,
    what: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    seed: int | Sequence[int] | None = None,
    sources: Sequence[str] = (),
    machine: str | None = None,
    duration_s: float | None = None,
) -> Path:
    """Write folder/NAME.json: the rows, what it takes to measure them again, and of which sources they are.

    `machine` is another than this one, on which they were measured.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise TaskError(f"a result cannot be called {name!r}; give letters, digits, - and _")
    record = {
        "command": command,
        "commit": _commit(),
        "machine": machine or this_machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        **({} if duration_s is None else {"duration_s": round(duration_s)}),
        "what": what,
        "sources": {source: _digest(Path(source)) for source in sources},
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def results_page(folder: Path) -> str:
    """The page of all records in a folder; the same records give the same text."""
    head = folder / "head.md"  # what readers ask for first
    first = f"\n{with_figures(head.read_text(encoding='utf-8'), folder)}" if head.exists() else ""
    return _HEAD + first + _claims(folder) + "".join(_section(path) for path in sorted(folder.glob("*.json")))


def run_experiment(folder: Path, name: str) -> Path:
    """Run a declared experiment, and write its record: a row for each scheme's result."""
    declared = {one["name"]: one for one in _declared(folder).get("experiment", [])}
    if name not in declared:
        raise TaskError(f"no experiment is called {name!r}; write one of {', '.join(declared)}")
    args = declared[name]
    start = time.monotonic()
    all_rows = (_compared if args["command"].startswith("laconic compare") else _printed)(args)
    rows = [{key: row[key] for key in args.get("columns", row)} for row in all_rows]
    duration_s = time.monotonic() - start
    about = {key: args[key] for key in ("what", "command", "sources")}
    return write_result(folder, name, rows=rows, seed=args.get("seeds", 0), duration_s=duration_s, **about)


def _compared(experiment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results of a comparison, scheme by scheme."""
    with tempfile.TemporaryDirectory() as out:
        _run(experiment, ["--out", out], stdout=sys.stderr)
        return rows_of(Path(out), _COLUMNS if experiment["machine"] == "any" else _COLUMNS + _TIMES)


def _printed(experiment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that another command prints, an object a line, or one object with a list of them as "fits"."""
    printed = _run(experiment, [], stdout=subprocess.PIPE).stdout
    objects = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [row for each in objects for row in each.get("fits", [each])]


def _run(experiment: Mapping[str, Any], more: Sequence[str], stdout: Any) -> subprocess.CompletedProcess[str]:
    words = shlex.split(experiment["command"])
    command = [sys.executable, *(words[1:] if words[0] == "python" else ["-m", *words]), *more]
    ran = subprocess.run(command, stdout=stdout, check=False, text=True)
    if ran.returncode:
        raise TaskError(f"{experiment['command']} did not end well; its own words say why")
    return ran


def rows_of(out: Path, columns: Sequence[str] = _COLUMNS) -> list[dict[str, Any]]:
    """What a comparison found, scheme by scheme; what it did not measure is left out."""
    lines = [line for path in sorted(out.rglob("records.jsonl")) for line in path.read_text("utf-8").splitlines()]
    found = [fact for fact in map(json.loads, lines) if fact["kind"] == "result"]
    both_ways = [{**fact, "bytes_both_ways": fact["bytes_out"] + fact["bytes_in"]} for fact in found]
    return [{column: fact[column] for column in columns if fact.get(column) is not None} for fact in both_ways]


def _declared(folder: Path) -> dict[str, Any]:
    declared = folder / "claims.toml"
    return tomllib.loads(declared.read_text(encoding="utf-8")) if declared.exists() else {}


def _claims(folder: Path) -> str:
    """The claims whose records exist, by paper, and the commands that would measure the others."""
    declared = _declared(folder)
    claims = [claim for claim in declared.get("claim", []) if (folder / f"{_record_of(claim)}.json").exists()]
    rows = [_claim_row(folder, claim) for claim in claims]
    head = "| claim | whose | published | beside | wanted | measured | holds | commit |\n" + "|---" * 8 + "|\n"
    table = f"\n## Claims\n\n{head}" + "".join(rows) if rows else ""
    missing = [one for one in declared.get("experiment", []) if not (folder / f"{one['name']}.json").exists()]
    to_run = "".join(f"- {one['name']} (machine: {one['machine']}): `{one['command']}`\n" for one in missing)
    return table + (f"\nDeclared, and not measured on record:\n\n{to_run}" if to_run else "")


def _claim_row(folder: Path, claim: Mapping[str, Any]) -> str:
    name, *row, column = claim["figure"].split("; ")
    values = figures_by_seed(folder, name, "; ".join(row), column)
    value = sum(values) / len(values)
    least, most = claim.get("at_least", -math.inf), claim.get("at_most", math.inf)
    wanted = f"at least {least:g}" if "at_least" in claim else f"at most {most:g}"
    spread = f", {_cell(min(values))} to {_cell(max(values))} in {len(values)} seeds" if len(values) > 1 else ""
    cells = [
        claim["claim"],
        claim.get("source", "ours"),
        claim.get("published", "-"),
        claim.get("control", "-"),
        wanted,
        f"[{_cell(value)}](#{name}){spread}",
        "yes" if least <= value <= most else "**no**",
        _commit_word(read_result(folder / f"{name}.json")) or "-",
    ]
    return f"| {' | '.join(cells)} |\n"


def _record_of(claim: Mapping[str, Any]) -> str:
    return str(claim["figure"]).split("; ")[0]


def with_figures(text: str, folder: Path) -> str:
    """The text with every figure that it marks as the records in a folder have it today."""

    def figure(found: re.Match[str]) -> str:
        name, row, column = (part.strip() for part in found.groups())
        value = _figure(folder, name, row, column)
        return f"<!-- {name}; {row}; {column} -->{_times(value) if ' over ' in row else _cell(value)}<!-- -->"

    return _FIGURE.sub(figure, text)


def _figure(folder: Path, name: str, row: str, column: str) -> Any:
    """One cell of a record, how many times one is another, `A over B`, or how much more, `A minus B`."""
    rows = read_result(folder / f"{name}.json")["rows"]
    if " minus " in row:
        first, second = (float(_value(rows, side, column, name)) for side in row.split(" minus "))
        return first - second
    values = [_value(rows, one, column, name) for one in row.split(" over ")]
    return values[0] if len(values) == 1 else float(values[0]) / float(values[1])


def figures_by_seed(folder: Path, name: str, row: str, column: str) -> list[float]:
    """That figure for each seed of a record, or the one that there is."""
    rows = read_result(folder / f"{name}.json")["rows"]
    operator = " minus " if " minus " in row else " over "
    try:
        cells = [_value(rows, side, f"{column} by seed", name) for side in row.split(operator)]
    except TaskError:
        return [float(_figure(folder, name, row, column))]
    if len(cells) == 1:
        return [float(value) for value in cells[0]]
    return [a - b if operator == " minus " else a / b for a, b in zip(*cells, strict=True)]


def _value(rows: Sequence[Mapping[str, Any]], row: str, column: str, name: str) -> Any:
    wanted = {part.strip() for part in row.split(";")}
    found = [
        one[column]
        for one in rows
        if column in one
        and wanted <= {str(next(iter(one.values()))), *(f"{key}={value}" for key, value in one.items())}
    ]
    if len(found) != 1:
        raise TaskError(f"{len(found)} rows of {name} are {row!r} and have {column!r}; name one, by its first cell")
    return found[0]


def changed_sources(record: Mapping[str, Any]) -> list[str]:
    """The folders that a record measured and that are no longer as they were."""
    return [folder for folder, was in record.get("sources", {}).items() if _digest(Path(folder)) != was]


def ages(folder: Path) -> list[str]:
    """A line for each record: the commit that it was made on, and which of its sources have changed since.

    Sources are the record's own, or those that claims.toml names for it. Where a record has no digests the
    repository's history tells.
    """
    lines = []
    for path in sorted(folder.glob("*.json")):
        record = read_result(path)
        sources = sources_of(folder, path.stem)
        changed = changed_sources(record) if record.get("sources") else _changed_since(_commit_word(record), sources)
        news = "unchanged" if not changed else f"changed since: {', '.join(changed)}"
        lines.append(f"{path.stem} ({record['commit']}, {record['date']}): {news}")
    return lines


def sources_of(folder: Path, name: str) -> list[str]:
    """The paths that a record speaks of."""
    named = _declared(folder).get("sources", {}).get(name, [])
    return list(read_result(folder / f"{name}.json").get("sources") or named)


def _changed_since(commit: str, sources: Sequence[str]) -> list[str]:
    if not commit:
        return list(sources)
    differing = ["git", "diff", "--quiet", commit, "HEAD", "--"]
    return [each for each in sources if subprocess.run([*differing, each], check=False, capture_output=True).returncode]


def _commit_word(record: Mapping[str, Any]) -> str:
    """The first commit that a record names."""
    first = re.search(r"\b[0-9a-f]{7,40}\b", record["commit"])
    return first[0][:7] if first else ""


def _digest(folder: Path) -> str:
    made = hashlib.sha256()
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.is_file() and path.suffix in (".py", ".cpp", ".h"):
            made.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return made.hexdigest()[:16]


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def read_result(path: Path) -> dict[str, Any]:
    """A record, with all that it needs to be measured again."""
    if not path.exists():
        raise TaskError(f"there is no record {path}; `results add` writes one")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    lacking = [key for key in _KEYS if key not in record]
    if lacking:
        raise TaskError(f"{path} lacks {lacking[0]!r}; a result has {', '.join(_KEYS)}")
    return record


def _section(path: Path) -> str:
    record = read_result(path)
    columns = list(dict.fromkeys(name for row in record["rows"] for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in record["rows"]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    seeds = record.get("seed")
    seed = (
        ""
        if seeds is None
        else f", seeds {', '.join(map(str, seeds))}"
        if isinstance(seeds, list)
        else f", seed {seeds}"
    )
    took = f", measured in {record['duration_s']:,} s" if "duration_s" in record else ""
    made = f"`{record['command']}`, commit {record['commit']}, {record['machine']}, {record['date']}{seed}{took}."
    at_build = "".join(
        f"<!-- {made} of {path.stem} -->\n\n" for made, key in (("plot", "plot"), ("age", "sources")) if record.get(key)
    )
    return f"\n## {path.stem}\n\n{record['what']}\n\n{at_build}{table}\n\n{made}\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
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


def this_machine() -> str:
    """In words."""
    system = f"{platform.system()} on {platform.machine()}"
    return f"{os.cpu_count()} cores of {_processor()}, {system}, Python {platform.python_version()}"


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", table.read_text(), re.M) if table.exists() else None
    return found[1] if found else platform.machine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Add a record, or make the page."""
    parser = argparse.ArgumentParser(prog="python tools/results.py", description="Records and their page.")
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="write results/NAME.json from rows on stdin, one JSON object a line")
    add.add_argument("name")
    add.add_argument("--what", required=True, help="one sentence: what was measured")
    add.add_argument("--command", required=True, help="what printed the rows")
    add.add_argument("--seed", type=int)
    add.add_argument("--source", action="append", default=[], help="a folder that was measured")
    run = actions.add_parser("run", help="run experiments that claims.toml declares, write their records, and the page")
    run.add_argument("name", nargs="*", help="all of a machine's, unless some are named")
    run.add_argument("--machine", default="any", help="any: accuracy and bytes alone; lab: root and quiet cores")
    actions.add_parser("page", help=f"write {PAGE}, and the figures that README.md and docs/ mark, from all records")
    actions.add_parser("age", help="say of each record which of its sources have changed since it was made")
    args = parser.parse_args(arguments)
    if args.action == "age":
        print("\n".join(ages(RESULTS)))
    elif args.action == "add":
        rows = [json.loads(line) for line in sys.stdin if line.strip()]
        about = {"what": args.what, "command": args.command, "seed": args.seed, "sources": args.source}
        print(write_result(RESULTS, args.name, rows=rows, **about))
    else:
        if args.action == "run":
            of_machine = [one["name"] for one in _declared(RESULTS)["experiment"] if one["machine"] == args.machine]
            for name in args.name or of_machine:
                print(run_experiment(RESULTS, name))
        PAGE.write_text(results_page(RESULTS), encoding="utf-8")
        for page in (Path("README.md"), *sorted(PAGE.parent.glob("*.md"))):
            page.write_text(with_figures(page.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
