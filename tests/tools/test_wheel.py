"""What users install: a wheel with everything inside."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from laconic import __version__

ROOT = Path(__file__).parents[2]


def test_one_wheel_a_platform_serves_all_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == __version__
    assert project["tool"]["scikit-build"]["wheel"]["py-api"] == "py3"
    wheels = project["tool"]["cibuildwheel"]
    assert len(wheels["build"].split()) == 1 and set(wheels["linux"]["archs"]) == {"x86_64", "aarch64"}


@pytest.mark.slow  # builds the kernels and installs torch: minutes
def test_a_wheel_works_in_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from try_wheel import try_wheel

    try_wheel(tmp_path)
