"""Records of figures, and the page that is made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.errors import TaskError
from laconic.measure.results import PAGE, RESULTS, results_page, with_figures, write_result

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_records_say() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == results_page(ROOT / RESULTS)


def test_a_record_says_how_to_measure_it_again(tmp_path: Path) -> None:
    rows = [{"scheme": "a|b", "ms": 1.23456}, {"scheme": "dense", "bytes": 1200}]
    path = write_result(tmp_path, "steps", what="Step times.", command="laconic compare", rows=rows, seed=3)
    record = json.loads(path.read_text())
    assert set(record) == {"command", "commit", "machine", "date", "seed", "what", "rows"} and record["rows"] == rows
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
