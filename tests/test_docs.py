"""Everything in the README and the docs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workers import run_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.name}-{number}", code)
        for page in PAGES
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    ]


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in _blocks()])
def test_python_in_the_docs_runs(code: str, tmp_path: Path) -> None:
    if "init_process_group" not in code:
        exec(
            compile(code, "docs", "exec"), {"__name__": "__main__"}
        )  # here: starting torch takes longer than any of them
        return
    script = tmp_path / "script.py"
    script.write_text(code)
    codes, printed = run_script(script, 3 if "laconic.serve" in code else 2)
    assert not any(codes), printed
    assert "20 steps (0 skipped), 2 workers" in printed


def test_each_question_has_a_page_with_python() -> None:
    names = {name.rsplit("-", 1)[0] for name, _ in _blocks()}
    assert {"README.md", "what.md", "how.md", "where.md", "when.md"} <= names
    assert (ROOT / "docs" / "kept.md").exists()


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_in_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^ +make (\w+)|`make (\w+)`", readme, re.M):
        assert re.search(rf"^{target[0] or target[1]}:", makefile, re.M)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
