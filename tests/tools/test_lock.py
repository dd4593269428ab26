"""The lists of what CI installs: complete, in the versions that the tests ran with, and each file with its hash."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement

import lock

LISTED = {name: lock.locked(name) for name in lock.LISTS}
ALL = {project: entry for listed in LISTED.values() for project, entry in listed.items()}


def is_locked(text: str) -> bool:
    """Whether a list, or torch's build, has what this asks for here."""
    wanted = Requirement(text)
    name = lock.normalized(wanted.name)
    if (wanted.marker and not wanted.marker.evaluate({"extra": ""})) or lock.NOT_LISTED.fullmatch(name):
        return True
    return name in ALL and wanted.specifier.contains(ALL[name][0], prereleases=True)


@pytest.mark.parametrize("name", lock.LISTS)
def test_every_entry_has_a_version_and_hashes(name: str) -> None:
    text = (lock.LOCKS / f"{name}.txt").read_text()
    assert len(LISTED[name]) == sum(not line.startswith((" ", "#")) for line in text.splitlines())
    assert text.count("--hash=") == sum(len(hashes) for _, hashes in LISTED[name].values())
    assert "://" not in text, "an index is the machine's to choose"


def test_lists_and_constraints_agree() -> None:
    assert sum(map(len, LISTED.values())) == len(ALL), "a project is in two lists"
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (lock.ROOT / "constraints.txt").read_text(), re.M))
    unlisted = {"torch", *(lock.normalized(Requirement(text).name) for text in lock.required("frameworks"))}
    assert {name: version for name, version in pinned.items() if ALL.get(name, ("",))[0] != version}.keys() <= unlisted


def test_what_is_required_is_listed() -> None:
    wanted = [*lock.required_always(), *(text for extra in lock.LISTS for text in lock.required(extra))]
    assert [text for text in wanted if not is_locked(text)] == []


def test_what_is_listed_needs_nothing_else_and_is_what_runs_here() -> None:
    missing, others = [], {}
    for name, (version, _) in ALL.items():
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            assert name not in LISTED["dev"] or name in ("scikit-build-core", *lock.BUILDERS), (
                f"{name} is not installed"
            )
            continue
        if installed.version != version:
            others[name] = installed.version
        missing += [f"{name}: {text}" for text in installed.requires or [] if not is_locked(text)]
    missing += [f"torch: {text}" for text in distribution("torch").requires or [] if not is_locked(text)]
    assert missing == [] and others == {}
