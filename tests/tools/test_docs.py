"""Everything in the README and the docs runs, leads somewhere, is short, and has its figures from records."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from laconic import parse
from laconic.cli import all_commands
from laconic.planning import candidate
from results import PAGE, RESULTS, with_figures
from tests.workers import run_script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [page for page in PAGES if page not in (ROOT / PAGE, ROOT / "docs" / "support.md")]
MOST_WORDS, MOST_WORDS_OF_A_PAGE, MOST_LINES = 11_500, 900, 120  # words of prose: scripts stand in their pages whole
QUESTIONS = {"of-what.md", "what.md", "how.md", "kept.md", "where.md", "when.md"}
MEASURED = re.compile(r"\d (?:ms a step|times (?:faster|as fast|sooner)|points|% (?:less|fewer|faster))\b|\d\.\d\d %")


def _blocks() -> dict[str, str]:
    """Every piece of Python by the page that it is on; the same piece on two pages once."""
    pieces = {
        code: f"{page.name}-{number}"
        for page in PAGES
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
    }
    return {name: code for code, name in pieces.items()}


def _by_hand(page: Path) -> str:
    """What was written by hand: neither figures and scripts nor the comments that mark them."""
    inserted = r"<!-- (?:[^>]*; [^>]*|(?:script|text) of [^>]*) -->.*?<!-- -->"
    return re.sub(r"<!--.*?-->", "", re.sub(inserted, "", page.read_text(), flags=re.S), flags=re.S)


def _prose(page: Path) -> str:
    """That without its code."""
    return re.sub(r"^ {4}[^\n]*$|```.*?```", "", _by_hand(page), flags=re.S | re.M)


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in _blocks().items()])
def test_python_in_the_docs_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("wandb", "mlflow"):
        if f"import {package}\n" in code:
            pytest.importorskip(package, reason=f"pip install {package}; tests/integrations/test_monitoring.py runs it")
    if "import ray" in code:
        pytest.skip("tests/integrations/test_launch.py runs it where there is a Ray")
    if "init_process_group" not in code:  # here: starting torch takes longer than any of them
        monkeypatch.chdir(tmp_path)
        exec(compile(code, "docs", "exec"), {"__name__": "__main__"})
        return
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{code}")  # some write files
    codes, printed = run_script(script, 3 if "laconic.serve" in code else 2)
    assert not any(codes), printed
    assert "20 steps (0 skipped), 2 workers" in printed or "0.693 is guessing" in printed


def test_lines_that_a_diff_adds_are_in_a_script_that_runs() -> None:
    scripts = "".join(_blocks().values())
    diffs = [page.read_text() for page in PAGES if page.name in ("README.md", "using.md")]
    added = [line for diff in diffs for line in re.findall(r"^\+(.*)$", diff, re.M)]
    assert len(added) == 4 and all(line in scripts for line in added)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_in_pages_are_those_of_the_examples(page: Path) -> None:
    made = runpy.run_path(str(ROOT / "tools" / "site.py"))
    assert page.read_text() == made["with_scripts"](page.read_text()), "`python tools/site.py` writes them anew"
    assert page.name.startswith("with-") == ("<!-- script of " in page.read_text())


@pytest.mark.parametrize("name", ["accelerate", "fabric", "fsdp", "lightning", "torchft", "transformers"])
def test_pages_of_trainers_show_what_their_script_adds(name: str) -> None:
    diff = (ROOT / "docs" / f"with-{name}.md").read_text().split("```diff\n")[1].split("```")[0]
    script = (ROOT / "examples" / f"with_{name}.py").read_text()
    added = re.findall(r"^\+(.*)$", diff, re.M)
    assert len(added) >= 3 and all(line in script for line in added)
    assert "laconic" in added[0] and "laconic" not in re.sub(r"^\+.*$", "", diff, flags=re.M)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_code_fits_80_columns(page: Path) -> None:
    text = page.read_text()
    fenced = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.S))
    indented = "\n".join(re.findall(r"^ {4}(\S.*|  .*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M))
    assert [line for line in f"{fenced}\n{indented}".splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_comments_do_not_cut_paragraphs_and_headings_are_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    assert not re.findall(r"(?<=\S\n)<!-- [^>]*; .*|(?<=\n\n)\*\*[^*]+\*\*$", text, re.M)


def test_each_question_has_a_page_with_python() -> None:
    assert {name.rsplit("-", 1)[0] for name in _blocks()} >= QUESTIONS


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_in_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^ +make (\w+)|`make (\w+)`", readme, re.M):
        assert re.search(rf"^{target[0] or target[1]}:", makefile, re.M)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_commands_are_taken_as_written() -> None:
    declared = tomllib.loads((ROOT / RESULTS / "claims.toml").read_text())["experiment"]
    commands = [one["command"] for one in declared if one["command"].startswith("laconic ")]  # others are tools
    texts_of_pages = [re.sub(r"\\\n +", "", page.read_text()) for page in PAGES]  # lines that go on are one
    commands += [line for text in texts_of_pages for line in re.findall(r"^ {4}(laconic .*)", text, re.M)]
    taken = [shlex.split(line, comments=True) for line in commands if "..." not in line]
    assert len(taken) > 20
    for line in taken:
        asked = all_commands().parse_args(line[1 : line.index("|")] if "|" in line else line[1:])
        schemes = getattr(asked, "scheme", None) or []
        texts = [schemes] if isinstance(schemes, str) else schemes
        assert all(candidate(text) if line[1] == "plan" else parse(text) for text in texts)


def test_pages_are_short() -> None:
    words = {page.name: len(re.findall(r"\S*\w\S*", _prose(page))) for page in WRITTEN}
    assert all(number <= MOST_WORDS_OF_A_PAGE for number in words.values()), words
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values())} words: {words}"
    assert all(_prose(page).count("\n") < MOST_LINES for page in WRITTEN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_records(page: Path) -> None:
    assert page.read_text() == with_figures(page.read_text(), ROOT / RESULTS), "`results page` writes them anew"
    if page != ROOT / PAGE:
        assert not MEASURED.findall(_prose(page)), "a measured figure is inserted from a record, not typed"


def test_pictures_are_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from draw_pictures import PICTURES

    assert all(path.read_text(encoding="utf-8") == draw() for path, draw in PICTURES.items())
