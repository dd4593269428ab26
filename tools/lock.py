"""Write the lists of what CI installs, with hashes: `python tools/lock.py`, after constraints.txt has changed.

Each list in locks/ has the versions that pip resolves to, and the SHA-256 of every wheel of those for Linux (x86-64 and
aarch64) and macOS (arm64), as the package index states them. torch is in none, nor are the CUDA libraries that it alone
needs: which build of it fits is the machine's to say.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pip._internal.models.index import PyPI  # the default index, which this project need not name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
LISTS = ("dev", "docs")  # extras; a list holds what those before it do not
BUILDERS = ("cmake", "ninja")  # which scikit-build-core asks for where a machine has none
NOT_LISTED = re.compile(r"laconic(-lab)?|torch|triton|nvidia-.*|cuda-.*")
WHEELS = re.compile(
    r"-(py3\d*|py2\.py3|cp31[1-4]|cp3\d+-abi3)-.*(any|manylinux\w+_(x86_64|aarch64)|macosx_\w+_(arm64|universal2))\.whl$"
)
_LINK = re.compile(r'href="[^"]*/([^/"#]+\.whl)#sha256=([0-9a-f]{64})"')
_PIP = (sys.executable, "-m", "pip")
_HEAD = "# Written by tools/lock.py. All but torch, whose build depends on the machine.\n"


def normalized(name: str) -> str:
    """A project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each project in a list."""
    text = (LOCKS / f"{name}.txt").read_text()
    entries = re.findall(r"^([\w.-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M)
    return {project: (version, re.findall(r"sha256:(\w+)", hashes)) for project, version, hashes in entries}


def required(extra: str) -> Iterator[str]:
    """What laconic requires with this extra, each extra of its own that it names spelled out."""
    for text in _project("pyproject.toml")["project"]["optional-dependencies"][extra]:
        if named := re.fullmatch(r"laconic\[(.+)\]", text):
            for other in named[1].split(","):
                yield from required(other)
        else:
            yield text


def required_always() -> list[str]:
    """What both packages require, and what builds them."""
    library, lab = _project("pyproject.toml"), _project("lab/pyproject.toml")
    others = [
        *library["project"]["dependencies"],
        *lab["project"]["dependencies"],
        *library["build-system"]["requires"],
    ]
    return [*(text for text in others if not text.startswith("laconic")), *BUILDERS]


def _project(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text())


def resolve(requirements: Iterable[str], pins: Mapping[str, str]) -> dict[str, str]:
    """The version of each project that pip would install for these, under constraints.txt and what is pinned."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as known:
        known.write("".join(f"{name}=={version}\n" for name, version in pins.items()))
        known.flush()
        constraints = ("--constraint", "constraints.txt", "--constraint", known.name)
        installed = _report(*constraints, *requirements)
    versions = {normalized(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}
    return {name: versions[name] for name in sorted(versions) if not NOT_LISTED.fullmatch(name)}


def hashes(name: str, version: str) -> list[str]:
    """The SHA-256 of a version's wheels, as the index states them."""
    with urllib.request.urlopen(f"{_index().rstrip('/')}/{name}/") as page:
        links = _LINK.findall(page.read().decode())
    begin = re.compile(rf"{name.replace('-', '[-_.]+')}-{re.escape(version)}-", re.IGNORECASE)
    digests = {digest for file, digest in links if begin.match(file) and WHEELS.search(file)}
    if not digests:
        sys.exit(f"the index has no wheel of {name} {version}")
    return sorted(digests)


@cache
def _index() -> str:
    """The index that pip asks."""
    set_here = subprocess.run([*_PIP, "config", "get", "global.index-url"], capture_output=True, text=True, check=False)
    return os.environ.get("PIP_INDEX_URL") or set_here.stdout.strip() or PyPI.simple_url


def _report(*words: str) -> list[dict[str, Any]]:
    """What pip would install, as it reports it."""
    command = [*_PIP, "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    ran = subprocess.run([*command, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    report: list[dict[str, Any]] = json.loads(ran.stdout)["install"]
    return report


def main() -> None:
    """Write all lists."""
    pins: dict[str, str] = {}
    for name in LISTS:
        resolved = resolve([*required(name), *(() if pins else required_always())], pins)
        new = {project: version for project, version in resolved.items() if project not in pins}
        lines = (
            " \\\n    --hash=sha256:".join((f"{project}=={new[project]}", *hashes(project, new[project])))
            for project in new
        )
        (LOCKS / f"{name}.txt").write_text(_HEAD + "".join(f"{line}\n" for line in lines))
        print(f"locks/{name}.txt: {len(new)} projects", file=sys.stderr, flush=True)
        pins |= new


if __name__ == "__main__":
    main()
