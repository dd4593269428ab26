"""Records of figures, and the page that is made from them."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from laconic_lab.errors import TaskError
from results import (
    PAGE,
    RESULTS,
    ages,
    changed_sources,
    read_result,
    results_page,
    run_experiment,
    sources_of,
    with_figures,
    write_result,
)

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_records_say() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == results_page(ROOT / RESULTS)


def test_a_record_says_how_to_measure_it_again(tmp_path: Path) -> None:
    rows = [{"scheme": "a|b", "ms": 1.23456}, {"scheme": "dense", "bytes": 1200}]
    path = write_result(tmp_path, "steps", what="Step times.", command="laconic compare", rows=rows, seed=3)
    record = json.loads(path.read_text())
    assert (
        set(record) == {"command", "commit", "machine", "date", "seed", "what", "sources", "rows"}
        and record["rows"] == rows
    )
    page = results_page(tmp_path)
    for said in (
        "## steps",
        "Step times.",
        "| scheme | ms | bytes |",
        "| a\\|b | 1.235 | - |",
        "| dense | - | 1,200 |",
    ):
        assert said in page
    assert f"`laconic compare`, commit {record['commit']}" in page and "seed 3" in page
    path.write_text(json.dumps({**record, "machine": ""}).replace('"machine"', '"where"'))
    with pytest.raises(TaskError, match="lacks 'machine'"):
        results_page(tmp_path)
    with pytest.raises(TaskError, match="cannot be called"):
        write_result(tmp_path, "../steps", what="", command="", rows=rows)


def test_claims_hold_or_do_not(tmp_path: Path) -> None:
    rows = [{"scheme": "a", "s": 90.0, "s by seed": [88.0, 92.0]}, {"scheme": "b", "s": 8.0, "s by seed": [8.0, 8.0]}]
    path = write_result(tmp_path, "speed", what="", command="", rows=rows)
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": "0123abcd4567"}))
    claims = (
        '[[claim]]\nclaim = "b is faster"\nfigure = "speed; a over b; s"\nat_least = 3\n'
        '[[claim]]\nclaim = "by much"\nsource = "B, 2019"\ncontrol = "a"\nfigure = "speed; a minus b; s"\nat_most = 8\n'
        '[[claim]]\nclaim = "c is"\nsource = "C, 2020"\npublished = "2x"\nfigure = "c; c; s"\nat_most = 1\n'
        '[[experiment]]\nname = "c"\nmachine = "lab"\ncommand = "laconic c"\n'
    )
    (tmp_path / "claims.toml").write_text(claims)
    page = results_page(tmp_path)
    row = "| b is faster | ours | - | - | at least 3 | [11.25](#speed), 11 to 11.5 in 2 seeds | yes | 0123abc |"
    assert row in page
    assert "| by much | B, 2019 | - | a | at most 8 | [82](#speed), 80 to 84 in 2 seeds | **no** | 0123abc |" in page
    assert "c is" not in page and "- c (machine: lab): `laconic c`" in page  # none in the table without a record


def test_each_record_says_of_which_sources_it_speaks() -> None:
    declared = tomllib.loads((ROOT / RESULTS / "claims.toml").read_text(encoding="utf-8"))
    experiments = {one["name"]: one["sources"] for one in declared["experiment"]}
    records = {path.stem for path in (ROOT / RESULTS).glob("*.json")}
    named = {name: sources_of(ROOT / RESULTS, name) for name in sorted(records)} | experiments
    assert [name for name, sources in named.items() if not sources] == [], "name them in results/claims.toml"
    gone = {each for sources in named.values() for each in sources if not (ROOT / each).exists()}
    assert gone == set(), "no longer there; `python tools/results.py age` says which records speak of them"
    claimed = {claim["figure"].split("; ")[0] for claim in declared["claim"]}
    assert claimed <= records | set(experiments)


def test_a_declared_experiment_writes_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = (
        '[[experiment]]\nname = "two"\nmachine = "any"\nwhat = "W."\nsources = []\ncommand = "laconic compare -x"\n'
    )
    (tmp_path / "claims.toml").write_text(declared)

    def compare(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "laconic", "compare"] and command[-2] == "--out"
        facts = [
            {"kind": "job"},
            {"kind": "result", "scheme": "bf16", "bytes_out": 6, "bytes_in": 7, "server_bytes_out": None},
        ]
        (Path(command[-1]) / "records.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
        return subprocess.CompletedProcess(command, 0 if "-x" in command else 2)

    monkeypatch.setattr("results.subprocess.run", compare)
    monkeypatch.setattr("results._commit", lambda: "c")
    clock = iter((5.0, 98.4, 100.0))
    # Instead of `time.monotonic`, which threads of other tests ask too.
    monkeypatch.setattr("results.time", SimpleNamespace(monotonic=lambda: next(clock)))
    record = read_result(run_experiment(tmp_path, "two"))
    assert record["rows"] == [{"scheme": "bf16", "bytes_out": 6, "bytes_both_ways": 13}] and record["what"] == "W."
    assert record["duration_s"] == 93 and ", seed 0, measured in 93 s." in results_page(tmp_path)
    (tmp_path / "claims.toml").write_text(declared.replace("-x", "-y"))
    with pytest.raises(TaskError, match="laconic compare -y did not end well"):
        run_experiment(tmp_path, "two")
    printed = declared.replace("laconic compare -x", "laconic bench select --json") + "seeds = [0, 1]\n"
    (tmp_path / "claims.toml").write_text(printed)

    def bench(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout='a word\n{"ms": 3}\n')

    monkeypatch.setattr("results.subprocess.run", bench)
    monkeypatch.setattr("results.time", SimpleNamespace(monotonic=lambda: 0.0))
    assert read_result(run_experiment(tmp_path, "two"))["rows"] == [{"ms": 3}]
    assert ", seeds 0, 1, " in results_page(tmp_path)
    with pytest.raises(TaskError, match="no experiment is called 'three'; write one of two"):
        run_experiment(tmp_path, "three")


def test_a_record_tells_when_its_sources_have_changed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("a = 1\n")
    path = write_result(tmp_path, "speed", what="", command="", rows=[{"s": 1}], sources=[str(source)])
    assert changed_sources(read_result(path)) == [] and "<!-- age of speed -->" in results_page(tmp_path)
    (source / "a.py").write_text("a = 2\n")
    assert changed_sources(read_result(path)) == [str(source)]
    (line,) = ages(tmp_path)
    assert line.startswith("speed (") and line.endswith(f"changed since: {source}")


def test_a_text_has_its_figures_from_records(tmp_path: Path) -> None:
    rows = [{"scheme": "dense", "hosts": 2, "s": 90.0}, {"scheme": "topk:rho=0.01", "hosts": 2, "s": 8.25}]
    rows.append({"scheme": "dense", "hosts": 4, "s": 1234})
    write_result(tmp_path, "speed", what="", command="", rows=rows)
    marked = "<!-- speed; {} -->{}<!-- -->"
    for where, figure in (
        ("topk:rho=0.01; s", "8.25"),
        ("dense; hosts=4; s", "1,234"),
        ("dense; hosts=2 over topk:rho=0.01; s", "11"),
    ):
        wanted = f"In {marked.format(where, figure)} s."
        assert (
            with_figures(f"In {marked.format(where, 'old')} s.", tmp_path) == wanted == with_figures(wanted, tmp_path)
        )
    for where, error in (("dense; s", "2 rows of speed"), ("bf16; s", "0 rows"), ("dense; hosts=2; ms", "0 rows")):
        with pytest.raises(TaskError, match=error):
            with_figures(marked.format(where, ""), tmp_path)
    with pytest.raises(TaskError, match="no record"):
        with_figures("<!-- slowness; dense; s --><!-- -->", tmp_path)
