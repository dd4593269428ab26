"""Where laconic was run: `run` lets pytest run here and notes the outcome, `page` writes docs/support.md of all notes.

    python tools/support.py run --backend gloo -- tests/adapters tests/integrations
    python tools/support.py page

A note is a line of results/support.jsonl: where, with what, which tests, how many passed, when, at which commit. A
later one of the same place and tests takes its place. Experiments count as run by hand, by their records' machines.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from results import RESULTS, _commit, read_result

ROOT = Path(__file__).parents[1]
NOTES = ROOT / RESULTS / "support.jsonl"
PAGE = ROOT / "docs" / "support.md"
FRAMEWORKS = ("accelerate", "lightning", "torchft", "transformers")
_PLACE = ("os", "python", "torch", "backend", "gpu", "frameworks", "tests")  # of which the latest note counts
NEVER = {  # what nobody has run, while no note has it
    "macOS": ("os", "Darwin"),
    "Windows": ("os", "Windows"),
    "NCCL among several ranks": ("backend", "nccl"),
    "AMD GPUs": ("gpu", "AMD"),
}
_HEAD = """# Where it was run

`tools/support.py page` writes this from what `tools/support.py run` noted, constraints.txt and [records](results.md).

| where | Python | torch | backend | GPU | frameworks | what | how |
|---|---|---|---|---|---|---|---|
"""


def noted() -> list[dict[str, Any]]:
    """All notes, the first one first."""
    return [json.loads(line) for line in NOTES.read_text("utf-8").splitlines()] if NOTES.exists() else []


def run(backend: str, tests: Sequence[str]) -> int:
    """Let pytest run these tests, and note the outcome where all of them passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *tests]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(ended.stdout[-2000:])
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)", ended.stdout)}
    if ended.returncode or not counts.get("passed"):
        return ended.returncode or 1
    note = {
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": backend,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "frameworks": ", ".join(f"{name} {version}" for name in FRAMEWORKS if (version := _version(name))),
        "tests": " ".join(tests),
        "passed": counts["passed"],
        "skipped": counts.get("skipped", 0),
        "date": date.today().isoformat(),
        "commit": _commit(),
    }
    others = [old for old in noted() if any(old[name] != note[name] for name in _PLACE)]
    NOTES.write_text("".join(json.dumps(each) + "\n" for each in [*others, note]), "utf-8")
    return 0


def page() -> str:
    """The page: what each change runs, what was run by hand, and what never was."""
    pinned = _pinned()
    frameworks = ", ".join(f"{name} {pinned[name]}" for name in FRAMEWORKS)
    rows = [["Linux", "CI's own", pinned["torch"], "gloo", "none", frameworks, "`.ci/run`", "CI, at every change"]]
    for note in noted():
        outcome = f"`{note['tests']}`: {note['passed']} passed, {note['skipped']} skipped"
        facts = [note[name] or "none" for name in _PLACE[:-1]]
        rows.append([*facts, outcome, f"by hand, {note['date']}, commit {note['commit']}"])
    table = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    machines = [f"| {machine} | [{name}](results.md#{name}) | {day} |" for machine, (day, name) in _machines().items()]
    return (
        f"{_HEAD}{table}\n**Experiments**, by hand, the latest record of each machine:\n\n"
        "| machine | record | date |\n|---|---|---|\n" + "\n".join(machines) + f"\n\n**Never run:** {never()}.\n"
    )


def _machines() -> dict[str, tuple[str, str]]:
    """(the date, the name) of the latest record, by machine."""
    latest: dict[str, tuple[str, str]] = {}
    for path in sorted((ROOT / RESULTS).glob("*.json")):
        record = read_result(path)
        latest[record["machine"]] = max(latest.get(record["machine"], ("", "")), (str(record["date"]), path.stem))
    return latest


def _pinned() -> dict[str, str]:
    """The versions that tests run with."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M))


def never() -> str:
    """What nobody has run."""
    return ", ".join(what for what, (name, word) in NEVER.items() if all(word not in note[name] for note in noted()))


def line() -> str:
    """One line of it, for a first page."""
    gpus = sorted({gpu for machine in _machines() for gpu in re.findall(r"\b[ABH]\d{2,3}\b", machine)})
    return (
        f"Tested at every change on Linux with torch {_pinned()['torch']} over Gloo; "
        f"by hand on NVIDIA {', '.join(gpus)}; never run: {never()} ([all](docs/support.md))."
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> int:
    """Run, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run tests here, and note the outcome")
    one.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    one.add_argument("tests", nargs="+", help="for pytest, after --")
    commands.add_parser("page", help="write docs/support.md, and print a line for README")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.backend, arguments.tests)
    PAGE.write_text(page(), "utf-8")
    print(line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
